"""Compile mmcv's own NMS and RoIAlign for CPUs as a reference for ours: `python compile_operators.py FOLDER`.

Downloads the source distribution of the installed version from PyPI; g++ takes a minute or two. All 78 files of
mmcv._ext would take a quarter of an hour. Prints the variable to set for test_compiled_operators.py.
"""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

from setuptools import Distribution
from torch.utils.cpp_extension import BuildExtension, CppExtension

PACKAGE = "onedl-mmcv"
SOURCES = ("nms.cpp", "roi_align.cpp", "cpu/nms.cpp", "cpu/roi_align.cpp")
# Names of arguments as in mmcv/ops/csrc/pytorch/pybind.cpp.
BINDING = """
#include <torch/extension.h>
using at::Tensor;
Tensor nms(Tensor, Tensor, float, int);
void roi_align_forward(Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int, int, bool);
void roi_align_backward(Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int, int, bool);
#define ALIGNED py::arg("aligned_height"), py::arg("aligned_width"), py::arg("spatial_scale"), \\
    py::arg("sampling_ratio"), py::arg("pool_mode"), py::arg("aligned")
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("nms", &nms, py::arg("boxes"), py::arg("scores"), py::arg("iou_threshold"), py::arg("offset"));
  m.def("roi_align_forward", &roi_align_forward, py::arg("input"), py::arg("rois"), py::arg("output"),
        py::arg("argmax_y"), py::arg("argmax_x"), ALIGNED);
  m.def("roi_align_backward", &roi_align_backward, py::arg("grad_output"), py::arg("rois"), py::arg("argmax_y"),
        py::arg("argmax_x"), py::arg("grad_input"), ALIGNED);
}
"""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    code = download_source(folder) / "mmcv" / "ops" / "csrc"
    binding = folder / "binding.cpp"
    binding.write_text(BINDING)
    print(f"MMCV_EXT={compile_extension(code, binding, folder)}")


def download_source(folder: Path) -> Path:
    """Download the source distribution and return the folder it is unpacked to."""
    requirement = f"{PACKAGE}=={version(PACKAGE)}"
    options = ["--no-deps", "--no-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def compile_extension(code: Path, binding: Path, folder: Path) -> Path:
    """Build the shared object with the flags of mmcv's setup.py for a machine without a GPU."""
    sources = [str(code / "pytorch" / name) for name in SOURCES]
    extension = CppExtension(
        "_ext", [*sources, str(binding)], include_dirs=[str(code / "common")], extra_compile_args=["-std=c++17"]
    )
    distribution = Distribution({"name": "operators", "ext_modules": [extension]})
    command = BuildExtension(distribution, use_ninja=False)
    command.build_lib, command.build_temp = str(folder), str(folder / "objects")
    command.ensure_finalized()
    command.run()
    (library,) = folder.glob("_ext*.so")
    return library.resolve()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(Path(sys.argv[1]))
