#!/usr/bin/env bash
# The commands that make the results of this record again, one after another.
#
# First say where your checkpoints and images are: between the quotes, or by variables of the environment, as in
# `CHECKPOINT_1=dino:/data/a.pth bash commands.sh`. `bench inspect X` shows the digest of a checkpoint.
#
# checkpoint pixels-32: digest edc3ac5b890f15c626ded6de7dc0a5d8c370f5710544d94e377d955da3933a21
CHECKPOINT_1=${CHECKPOINT_1:-pixels:32}
# images caltech101: train 29afbbc5588b, val 7206a05422c0 (measured from torchvision:Caltech101:path-02fb0ab5/caltech101)
IMAGES_1=${IMAGES_1:-''}
# images cifar10: train 79c2e807e0fc, val a71ed4ae4831 (measured from cifar10:path-02fb0ab5/cifar10)
IMAGES_2=${IMAGES_2:-''}
# images flowers17: train af092970bd80, val 9a11c443982a (measured from folder:path-02fb0ab5/flowers17?val=0.25)
IMAGES_3=${IMAGES_3:-''}
# checkpoint vits14: digest c9fc642290066598d6e4bd5dc4712ac73995fa6c2d5721b90c9d490601d8df2e, file with SHA-256 93da3454d7888f3f995fd194487edc50a7ec3cda314f81482f79e9add3cae6e4 (measured from vits14)
CHECKPOINT_2=${CHECKPOINT_2:-''}
# images camvid: train 2af27ba8701b, val dc4edbbb4fea (measured from masks:path-02fb0ab5/camvid)
IMAGES_4=${IMAGES_4:-''}
# images davis2016: train e2fc7dec6953, val c62324900a53 (measured from davis:path-02fb0ab5/davis2016)
IMAGES_5=${IMAGES_5:-''}
# images flowers17: train af092970bd80, val 9a11c443982a (measured from folder:path-b691a74a/flowers17?val=0.25)
IMAGES_6=${IMAGES_6:-''}
# checkpoint vits14-start: digest e0df7e203ff101ef6429ec3464c61fdb909139055e0d7c7e78ac67bc77cda41e (measured from path-5084c52a/start)
CHECKPOINT_3=${CHECKPOINT_3:-''}
: "${CHECKPOINT_1:?say at the top of commands.sh where it is}"
: "${IMAGES_1:?say at the top of commands.sh where it is}"
: "${IMAGES_2:?say at the top of commands.sh where it is}"
: "${IMAGES_3:?say at the top of commands.sh where it is}"
: "${CHECKPOINT_2:?say at the top of commands.sh where it is}"
: "${IMAGES_4:?say at the top of commands.sh where it is}"
: "${IMAGES_5:?say at the top of commands.sh where it is}"
: "${IMAGES_6:?say at the top of commands.sh where it is}"
: "${CHECKPOINT_3:?say at the top of commands.sh where it is}"
set -e
bench run --checkpoint "$CHECKPOINT_1" --name pixels-32 --data caltech101="$IMAGES_1" --seed 0 --suite knn@dino,lowshot@mieb --out results
bench run --checkpoint "$CHECKPOINT_1" --name pixels-32 --data cifar10="$IMAGES_2" --seed 0 --limit 2500 --suite knn@dino,lowshot@mieb --out results
bench run --checkpoint "$CHECKPOINT_1" --name pixels-32 --data flowers17="$IMAGES_3" --seed 0 --suite health@val,knn@dino,logreg@dinov2,lowshot@mieb --out results
bench run --checkpoint "$CHECKPOINT_2" --name vits14 --data caltech101="$IMAGES_1" --seed 0 --suite knn@dino,lowshot@mieb --out results
bench run --checkpoint "$CHECKPOINT_2" --name vits14 --data camvid="$IMAGES_4" --seed 0 --suite dense_knn@capi --out results
bench run --checkpoint "$CHECKPOINT_2" --name vits14 --data cifar10="$IMAGES_2" --seed 0 --limit 2500 --image-size 98 --suite knn@dino,lowshot@mieb --out results
bench run --checkpoint "$CHECKPOINT_2" --name vits14 --data davis2016="$IMAGES_5" --seed 0 --limit 50 --suite video_propagation@dino --out results
bench run --checkpoint "$CHECKPOINT_2" --name vits14 --data flowers17="$IMAGES_6" --seed 0 --suite health@val,knn@dino,logreg@dinov2,lowshot@mieb --out results
bench run --checkpoint "$CHECKPOINT_3" --name vits14-start --data camvid="$IMAGES_4" --seed 0 --suite dense_knn@capi --out results
bench run --checkpoint "$CHECKPOINT_3" --name vits14-start --data cifar10="$IMAGES_2" --seed 0 --limit 2500 --image-size 98 --suite knn@dino,lowshot@mieb --out results
bench run --checkpoint "$CHECKPOINT_3" --name vits14-start --data flowers17="$IMAGES_3" --seed 0 --suite knn@dino,lowshot@mieb --out results
