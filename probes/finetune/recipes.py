"""The published recipes of fine-tuning: what they set of probes/tasks/finetune.py, and their sources."""

from probes.published import Published

MAE = dict(lr=5e-4, mixed_together=32, size="B")
LUT = dict(MAE, lr=2.5e-4, lr_rule="sqrt(batch)/8")
# BEiT's code, which ExtreMA and iBOT took over: its table of rates, its head.
BEIT = dict(lr=4e-3, lr_rule="absolute", warmup_epochs=20, schedule="beit", head_std=0.02, head_scale=1e-3, size="B")
EXTREMA = dict(BEIT, lr=1e-3, lr_rule="batch/256", warmup_epochs=5, layer_decay=0.75, branch="online")
IBOT = dict(BEIT, drop_path=0.2, pool="cls", interpolation="bilinear")
MOCA = dict(lr=1e-3, drop_path=0.2, size="B")
DEIT = dict(
    lr=5e-4,
    lr_rule="batch/512",
    epochs=150,
    schedule="deit",
    start=1e-6,
    floor=1e-5,
    layer_decay=1.0,
    pool="cls",
    head_std=0.02,
    mixed_together=256,
    repeats=3,
    size="B",
)
SMOKE = dict(
    lr=4e-3,
    lr_rule="absolute",
    batch=32,
    epochs=4,
    warmup_epochs=1,
    layer_decay=0.75,
    drop_path=0.0,
    policy="",
    crop_scale=0.8,
    flip=0.0,
    erase=0.0,
    mixup=0.0,
    cutmix=0.0,
)

MAE_SOURCE = "facebookresearch/mae FINETUNE.md and main_finetune.py; it reports the best epoch on val: select=val"
LUT_SOURCE = (
    "LUT supplementary, table D, and naver-ai/lut main_finetune.py:332-334 (blr * sqrt(batch) / 8), mixed by 32 as in "
    "docs/FINETUNE.md, whose blr 1e-3 and layer decay 0.75 for ViT-B differ; it reports the best epoch on val "
    "(select=val)"
)
EXTREMA_SOURCE = (
    "microsoft/ExtreMA finetune/run_class_finetuning.py, modeling_finetune.py:204-276; it reports the best epoch on "
    "val (select=val); mixed by 128 as in its README; "
)
IBOT_SOURCE = (
    "bytedance/ibot run.sh imagenet_cls, evaluation/README.md, run_class_finetuning.py:92 (lr 4e-3; theirs is swept), "
    ":288 (bilinear in evaluation); it reports the best epoch on val: select=val"
)


PUBLISHED = {
    "finetune@smoke": Published(SMOKE, "ours: seconds on digits; not to be compared with published numbers"),
    "finetune@mae": Published(MAE, MAE_SOURCE, 2),
    "finetune@mae_L": Published(
        dict(MAE, lr=1e-3, epochs=50, layer_decay=0.75, drop_path=0.2, size="L"), MAE_SOURCE, 2
    ),
    "finetune@mae_H": Published(
        dict(MAE, lr=1e-3, epochs=50, layer_decay=0.75, drop_path=0.3, mixed_together=16, size="H"), MAE_SOURCE, 3
    ),
    "finetune@lut_S": Published(dict(LUT, lr=5e-4, epochs=300, layer_decay=0.75, size="S"), LUT_SOURCE, 2),
    "finetune@lut": Published(LUT, LUT_SOURCE, 2),
    "finetune@lut_L": Published(dict(LUT, lr=1e-3, epochs=50, size="L"), LUT_SOURCE, 2),
    "finetune@lut_docs": Published(
        dict(LUT, lr=1e-3, layer_decay=0.75),
        "naver-ai/lut docs/FINETUNE.md, both of its commands (ViT-B, blr 1e-3, layer decay 0.75; 8 x 32 x 4 images), "
        "main_finetune.py:332-334; table D differs, see finetune@lut; it reports the best epoch on val (select=val)",
        2,
    ),
    "finetune@extrema_S": Published(
        dict(EXTREMA, epochs=200, size="S"), EXTREMA_SOURCE + "paper, table 13 (IN-1k weights)", 2
    ),
    "finetune@extrema": Published(EXTREMA, EXTREMA_SOURCE + "paper, table 13 (IN-1k weights)", 2),
    "finetune@extrema_22k": Published(
        dict(EXTREMA, lr=5e-4, layer_decay=0.65, drop_path=0.2),
        EXTREMA_SOURCE + "its README's command, for IN-22k weights; appendix E has drop path 0.1",
        2,
    ),
    "finetune@extrema_22k_S": Published(
        dict(EXTREMA, lr=5e-4, epochs=200, layer_decay=0.65, size="S"),
        EXTREMA_SOURCE + "paper, appendix E and table 13 (IN-22k weights: lr 5e-4, layer decay 0.65; 200 epochs)",
        2,
    ),
    "finetune@moca": Published(
        MOCA, "valeoai/MOCA README.md:125-148, eval_finetune.py (--global_pool --use_fc_norm, 8 x 128, last epoch)", 2
    ),
    "finetune@moca_L": Published(
        dict(MOCA, size="L"),
        "MOCA table 9 has a ViT-L at 84.9 and says nothing of its training; ours: that it is that of finetune@moca",
        2,
    ),
    "finetune@ibot_S": Published(dict(IBOT, epochs=200, layer_decay=0.75, drop_path=0.1, size="S"), IBOT_SOURCE, 3),
    "finetune@ibot": Published(IBOT, IBOT_SOURCE, 3),
    "finetune@ibot_L": Published(
        dict(IBOT, epochs=50, warmup_epochs=5, layer_decay=0.75, drop_path=0.4, mixed_together=64, size="L"),
        IBOT_SOURCE,
        3,
    ),
    "finetune@simmim": Published(
        # Start and floor are 2.5e-7 for 512 images, scaled like the rate (main_finetune.py:322-333).
        dict(BEIT, lr=1.25e-3, lr_rule="batch/512", batch=2048, schedule="simmim", start=1e-6, floor=1e-6, clip=5.0),
        "microsoft/SimMIM configs/vit_base__800ep/simmim_finetune*.yaml, utils.py:98-284, main_finetune.py:322-333; "
        "batch 2048 is that of its README's Swin command, the yaml leaves the number of GPUs open; it reports the best "
        "epoch on val: select=val",
        2,
    ),
    "finetune@beit": Published(
        BEIT,
        "microsoft/unilm beit/get_started_for_image_classification.md (ViT-B after self-supervision), "
        "run_class_finetuning.py; best epoch on val",
        2,
    ),
    "finetune@data2vec": Published(
        dict(BEIT, warmup_epochs=10, drop_path=0.2, weight_decay=0.0, tables="shared"),
        "facebookresearch/data2vec_vision README.md (ViT-B), run_class_finetuning.py:324-325; its image statistics are "
        "0.5 unless the export says otherwise (--statistics half on import); best epoch on val",
        2,
    ),
    "finetune@deit": Published(
        DEIT,
        "facebookresearch/moco-v3 README.md (End-to-End Classification: DeiT's code with --epochs 150, 83.2 for its "
        "ViT-B) and facebookresearch/deit main.py (lr 5e-4 for 512 images, warm-up from 1e-6, floor 1e-5, repeated "
        "augmentation; its averaged weights are not judged); batch 4 x 256 is that of DeiT's README; it reports the "
        "best epoch on val: select=val",
        2,
    ),
    "finetune@deit_S": Published(
        dict(DEIT, size="S"), "facebookresearch/moco-v3 README.md: its ViT-S by the same command, see finetune@deit", 2
    ),
    "finetune@maskfeat": Published(
        dict(lr=1e-3, batch=2048, warmup_epochs=20, head_std=0.02, head_scale=1e-3, mixed_together=32, size="B"),
        "facebookresearch/SlowFast projects/maskfeat, ViT-B (lr 2e-3 for 512 images, batch 2048, layer decay 0.65, "
        "drop path 0.1, warm-up 20, a cosine by update to 1e-6); ours: the warm-up begins at 0, not 1e-8, the head's "
        "bias at 0; it reports the best epoch on val: select=val",
        2,
    ),
    "finetune@cae": Published(
        dict(BEIT, lr=8e-3, batch=4096, warmup_epochs=5),
        "lxtGH/CAE scripts/cae_base_finetune.sh (ViT-B: lr 8e-3 at batch 4096, warm-up 5, layer decay 0.65, drop path "
        "0.1), BEiT's code; it reports the best epoch on val: select=val",
        2,
    ),
}

# All others report the best epoch on val.
REPORTS_LAST_EPOCH = ("finetune@smoke", "finetune@moca", "finetune@moca_L")
