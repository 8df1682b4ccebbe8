"""How soon the page of `bench report` is there: `python tests/benchmarks/report_page.py` (half a minute, two cores).

Pages of 500 checkpoints x 10 columns: one table of ten metrics, and ten tables of one. Each is opened by Chromium, from
disk, in a new tab: milliseconds from the start of the navigation until the document is parsed and its scripts have run
("parsed"), and until the second frame after that has been drawn ("drawn").
"""

import argparse
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.reports.contents import contents
from bench.reports.leaderboard import leaderboard_of
from bench.reports.page import page_of
from bench.results.record import CheckpointUsed, DataUsed, MetricRecord, ProtocolUsed, Result
from bench.results.store import StoredResult

DRAWN = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
  const navigation = performance.getEntriesByType("navigation")[0];
  done([navigation.domContentLoadedEventEnd, performance.now(), document.querySelectorAll("*").length]);
})))"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=500)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    print(f"{'':<10} {'CPU s':>7} {'MB':>6} {'elements':>9} {'parsed ms':>10} {'drawn ms':>9} {'slowest':>8}")
    browser = Browser(arguments.chromium)
    with tempfile.TemporaryDirectory() as folder:
        for name, tables in (("one table", 1), ("many", arguments.columns)):
            started = time.process_time()
            text = page(arguments.checkpoints, tables, arguments.columns // tables)
            render_seconds, path = time.process_time() - started, Path(folder, "page.html")
            path.write_text(text)
            opened = [browser.opened(path) for _ in range(arguments.rounds)]
            parsed, drawn, elements = (statistics.median(column) for column in zip(*opened, strict=True))
            slowest = max(times[1] for times in opened)
            sizes = f"{render_seconds:7.2f} {len(text.encode()) / 1e6:6.2f} {elements:9.0f}"
            print(f"{name:<10} {sizes} {parsed:10.0f} {drawn:9.0f} {slowest:8.0f}")
    browser.close()


def page(checkpoints: int, tables: int, metrics: int) -> str:
    """A report page of generated results."""
    random = np.random.RandomState(0)
    results = [
        result(number, table, random.uniform(40, 90, metrics))
        for number in range(checkpoints)
        for table in range(tables)
    ]
    stored = [StoredResult(path=Path("x"), result=result) for result in results]
    return page_of(contents(replace(leaderboard_of(results), results=stored)), {}, {})


def result(number: int, table: int, values: np.ndarray) -> Result:
    """A result of a checkpoint, with as many settings and facts as real ones have."""
    records = {
        f"top1_k{k}": MetricRecord(value=value, interval=(value - 2, value + 2), array="top1")
        for k, value in enumerate(values.tolist())
    }
    return Result(
        status="ok",
        task="knn",
        protocol=ProtocolUsed(name=f"knn@source{table}", version=1, source="eval_knn.py:1-20"),
        metrics=records,
        checkpoint=CheckpointUsed(
            name=f"checkpoint-{number}",
            digest=f"{number:064x}",
            architecture="ViT-S/16",
            parameters=22_000_000,
            method="dino",
            source=f"/data/runs/{number}/checkpoint.pth",
        ),
        data=DataUsed(name="in1k", url="imagenet:/data", images={"train": 1_281_167, "val": 50_000}),
        seed=0,
        settings={f"setting{number}": number for number in range(20)},
        versions={f"library{number}": "1.2.3" for number in range(12)},
        hardware={"processor": "a processor with a long name", "cores": 32},
        seconds=float(number),
        date="2026-01-02T03:04:05+00:00",
    )


class Browser:
    """Headless Chromium, driven through its pipe (chromedevtools.github.io/devtools-protocol)."""

    def __init__(self, chromium: str) -> None:
        (theirs, self.write), (self.read, answers) = os.pipe(), os.pipe()
        theirs, answers = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs, answers))  # not 3 and 4
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", *command],
            pass_fds=(theirs, answers),
            stderr=subprocess.DEVNULL,
        )
        self.number, self.rest, self.events = 0, b"", []

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict:
        """The answer to one command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        os.write(self.write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self.message()).get("id") != self.number:
            self.events.append(answer["method"])
        assert "error" not in answer, answer
        return answer["result"]

    def message(self) -> dict:
        while b"\0" not in self.rest:
            self.rest += os.read(self.read, 1 << 20)
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def opened(self, path: Path) -> tuple[float, float, float]:
        """Milliseconds until parsed and drawn, and elements, of a page in a new tab."""
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        self.call("Page.navigate", session, url=path.as_uri())
        while "Page.loadEventFired" not in self.events:
            self.events.append(self.message()["method"])
        self.events.clear()
        evaluated = self.call("Runtime.evaluate", session, expression=DRAWN, awaitPromise=True, returnByValue=True)
        self.call("Target.closeTarget", targetId=tab)
        return tuple(evaluated["result"]["value"])

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(10)


if __name__ == "__main__":
    main()
