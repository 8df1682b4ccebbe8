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
# DeiT's code, as iBOT has it for transfer: no layer decay, and its networks exempt no tokens from weight decay.
IBOT_TRANSFER = dict(DEIT, lr=7.5e-6, batch=768, epochs=1000, decay_tokens=True, mixed_together=96)
CAE = dict(BEIT, lr=8e-3, batch=4096, warmup_epochs=5, tables="fresh", train_positions=False, pooled_norm="pretrained")
MASKFEAT = dict(
    lr=1e-3,
    batch=2048,
    warmup_epochs=20,
    floor=4e-6,
    decay_tokens=True,
    head_std=0.02,
    head_scale=1e-3,
    mixed_together=64,
    judge_every=10,
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

DEIT_SOURCE = (
    "facebookresearch/deit main.py (lr 5e-4 for 512 images, warm-up from 1e-6, floor 1e-5, repeated augmentation; its "
    "averaged weights are not judged); batch 4 x 256 is that of DeiT's README; it reports the best epoch on val: "
    "select=val"
)
CAE_SOURCE = (
    "tools/run_class_finetuning.py:218-219 (RandAugment), :371-377 (the norm behind the mean starts as the encoder's), "
    "models/modeling_finetune.py:431 (sine positions do not train) and a relative table of zeros in every block (:39); "
    "it reports the best epoch on val: select=val"
)
MASKFEAT_SOURCE = (
    "cosine by update; tokens decay, ZERO_DECAY_POS_CLS), slowfast/config/defaults.py:1281-1284 (rate and floor grow "
    "with the shards); ours: the warm-up begins at 0, not 1e-8, biases of the new norm and the head at 0, not 0.02 and "
    "2e-5; it reports the best epoch on val: select=val"
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
    "finetune@msn": Published(
        dict(MAE, drop_path=0.2),
        "facebookresearch/msn README.md:121 (fine-tuned by MAE's code) and its paper, appendix A.4 (ViT-B: lr 2e-3 at "
        "batch 1024, 100 epochs, warm-up 5, layer decay 0.65, drop path 0.2); else " + MAE_SOURCE,
    ),
    "finetune@beit_L": Published(
        dict(BEIT, lr=1e-3, epochs=50, warmup_epochs=5, layer_decay=0.75, drop_path=0.2, mixed_together=64, size="L"),
        "microsoft/unilm beit/get_started_for_image_classification.md (BEiT-large after self-supervision, 8 x 64 x 2 "
        "images), run_class_finetuning.py; best epoch on val",
    ),
    "finetune@data2vec": Published(
        dict(BEIT, warmup_epochs=10, drop_path=0.2, weight_decay=0.0, tables="shared"),
        "facebookresearch/data2vec_vision README.md (ViT-B), run_class_finetuning.py:324-325; its image statistics are "
        "0.5 unless the export says otherwise (--statistics half on import); best epoch on val",
        2,
    ),
    "finetune@data2vec_L": Published(
        dict(
            BEIT,
            lr=5e-3,
            epochs=50,
            warmup_epochs=5,
            drop_path=0.25,
            mixed_together=64,
            tables="shared",
            size="L",
        ),
        "facebookresearch/data2vec_vision README.md (ViT-L, 16 x 64 images; its command names run_cyclical.py, which "
        "takes none of these options, and leaves the warm-up open: 5 epochs as BEiT's L is ours); else as "
        "finetune@data2vec",
    ),
    "finetune@deit": Published(
        dict(DEIT, epochs=150),
        "facebookresearch/moco-v3 README.md:85 (DeiT's code, ViT-B for 150 epochs, 83.2) and " + DEIT_SOURCE,
        2,
    ),
    "finetune@deit_S": Published(
        dict(DEIT, epochs=300, size="S"),
        "facebookresearch/moco-v3 README.md:85 (DeiT's defaults, 300 epochs; 150 are its ViT-B's alone) and "
        + DEIT_SOURCE,
        3,
    ),
    "finetune@ibot_transfer": Published(
        IBOT_TRANSFER,
        "bytedance/ibot run.sh:223-299 (8 x 96 images, lr 7.5e-6 for 512, 1000 epochs, class token; 7.5e-5 on Cars, "
        "360 epochs on iNaturalist), evaluation/README.md:117 (no layer decay; ViT-S: lr 5e-5 and 2.5e-5 on "
        "iNaturalist 2018 and 2019), evaluation/eval_cls.py; its averaged weights, which it does not judge, are left "
        "out; it reports the best epoch on val: select=val",
    ),
    "finetune@maskfeat": Published(
        MASKFEAT,
        "facebookresearch/SlowFast configs/masked_ssl/in1k_VIT_B_MaskFeat_FT.yaml (lr 2e-3 and floor 1e-6 for a shard "
        "of 8 x 64 images, here four: batch 2048, layer decay 0.65, drop path 0.1, warm-up 20, every 10th epoch "
        "judged, " + MASKFEAT_SOURCE,
        3,
    ),
    "finetune@maskfeat_L": Published(
        dict(
            MASKFEAT,
            epochs=50,
            warmup_epochs=5,
            floor=8e-6,
            layer_decay=0.75,
            mixed_together=32,
            judge_every=1,
            size="L",
        ),
        "facebookresearch/SlowFast configs/masked_ssl/in1k_VIT_L_MaskFeat_FT.yaml (lr 1e-3 and floor 1e-6 for a shard "
        "of 8 x 32 images, here eight: batch 2048, 50 epochs, layer decay 0.75, drop path 0.1, warm-up 5, "
        + MASKFEAT_SOURCE,
    ),
    "finetune@cae": Published(
        CAE,
        "lxtGH/CAE scripts/cae_base_finetune.sh (ViT-B: lr 8e-3 at batch 32 x 128, warm-up 5, layer decay 0.65, drop "
        "path 0.1), " + CAE_SOURCE,
        3,
    ),
    "finetune@cae_L": Published(
        dict(CAE, lr=2e-3, epochs=50, layer_decay=0.75, drop_path=0.2, mixed_together=64, size="L"),
        "lxtGH/CAE scripts/cae_large_finetune.sh (ViT-L: lr 2e-3 at batch 32 x 64 x 2, 50 epochs, layer decay 0.75, "
        "drop path 0.2), " + CAE_SOURCE,
    ),
}

# All others report the best epoch on val.
REPORTS_LAST_EPOCH = ("finetune@smoke", "finetune@moca", "finetune@moca_L")
