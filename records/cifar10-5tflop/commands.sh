#!/usr/bin/env bash
# The commands that make the results of this record again, one after another.
#
# First say where your checkpoints and images are: between the quotes, or by variables of the environment, as in
# `CHECKPOINT_1=dino:/data/a.pth bash commands.sh`. `bench inspect X` shows the digest of a checkpoint.
#
# checkpoint beit: digest 1470f7408ddd613be0ec8dec0be9b899f23f41becb5b9653c8a43273f52ad765, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-c63306bb/export)
CHECKPOINT_1=${CHECKPOINT_1:-''}
# checkpoint beit-start: digest d8cca9ac85b5a27c92d85d01f25596b5f1e1b6ebf6fc69aea40e42f8daa8be14, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-c63306bb/start)
CHECKPOINT_2=${CHECKPOINT_2:-''}
# checkpoint byol: digest 7261f4bf537b1e0006362aa75cdd9052013e99250a2abbb210aa3a877d867859, trained by byol, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-ba1f458e/export)
CHECKPOINT_3=${CHECKPOINT_3:-''}
# checkpoint byol-start: digest 2d291996b09f88e93c34050d7fe4601f8c71e8338681fe8f016a56be2a12cc8e, trained by byol, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-ba1f458e/start)
CHECKPOINT_4=${CHECKPOINT_4:-''}
# checkpoint cae: digest 4d2ab891addf2cefd4c53183bf101393bbe3f5cd4d6428043720c51b96342d1d, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-13325c14/export)
CHECKPOINT_5=${CHECKPOINT_5:-''}
# checkpoint cae-start: digest ec02321b681c9f48f02e5bc24c93c654e05908b60d75f4c68831831dd978606f, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-13325c14/start)
CHECKPOINT_6=${CHECKPOINT_6:-''}
# checkpoint can: digest 8cf84cd97cba621c05308a200414069cd15457980574396967e12b1dfd3ea9dc, trained by can, recipe 32px with batch=64 patch_size=8 (measured from path-92b16931/export)
CHECKPOINT_7=${CHECKPOINT_7:-''}
# checkpoint capi: digest 23fa12e41c2495632ddad2dc25030da2bf75ce94d96a51d418f6395b7f5172aa, trained by capi, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-6f3e9acf/export)
CHECKPOINT_8=${CHECKPOINT_8:-''}
# checkpoint capi-start: digest eb5e3711bd4a044d2f625e4366013942f4e1e525287ec6f9f18c92e87bd2bf6e, trained by capi, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-6f3e9acf/start)
CHECKPOINT_9=${CHECKPOINT_9:-''}
# checkpoint data2vec: digest 9a5185ab513af460358a282c124b461bf5b4920c31da7db488d2eb8119a4b3d3, trained by data2vec, recipe 32px with batch=64 lr=0.000667 num_mask_patches=10 min_mask_patches_per_block=2 patch_size=8 (measured from path-82e550d4/export)
CHECKPOINT_10=${CHECKPOINT_10:-''}
# checkpoint dino: digest ef0a9210ebc6a62542a91e89892216a6041d8f6fc293280fd734a882ad48d02e, trained by dino, recipe 32px with lr=0.003 patch_size=8 (measured from path-596c842b/export)
CHECKPOINT_11=${CHECKPOINT_11:-''}
# checkpoint dino-start: digest a59ad85269c4b3ec7c85057a40384ce4ad84d8f298a8ca1f671a20e54a25af99, trained by dino, recipe 32px with lr=0.003 patch_size=8 (measured from path-596c842b/start)
CHECKPOINT_12=${CHECKPOINT_12:-''}
# checkpoint dinov2: digest f363a1bd405bc79b924b491a7a732967cf7f1ef080add666997071203bf3aca7, trained by dinov2, recipe 32px with lr=0.003 patch_size=8 (measured from path-4510a1cb/export)
CHECKPOINT_13=${CHECKPOINT_13:-''}
# checkpoint dinov2-start: digest e9e6ee9c10e760d9ee7752607f175fdbaa39ec255779ce0704ac2d3595eee7f9, trained by dinov2, recipe 32px with lr=0.003 patch_size=8 (measured from path-4510a1cb/start)
CHECKPOINT_14=${CHECKPOINT_14:-''}
# checkpoint extrema: digest 843e09819d07fa556b655046139779f293f0945105623cfc3e0c9e9750450b1e, trained by extrema, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-b91bdca5/export)
CHECKPOINT_15=${CHECKPOINT_15:-''}
# checkpoint extrema-start: digest dd111b05e73929149b44afaebd414ee6154b486cc4f7a7f4e2ac004994bce2d9, trained by extrema, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-b91bdca5/start)
CHECKPOINT_16=${CHECKPOINT_16:-''}
# checkpoint ibot: digest 344eaa4985cf7d117ccc0e905a7d6ff1620aee0c13b249e25aae22b6463035fb, trained by ibot, recipe 32px with patch_size=8 (measured from path-a9fa63fb/export)
CHECKPOINT_17=${CHECKPOINT_17:-''}
# checkpoint ijepa: digest 11e9a9b4e55755c3e5babfdbbdb40b8b21d76b95094c6d33003990d14f20fbb0, trained by ijepa, recipe 32px with batch=64 lr=0.003 min_keep=1 patch_size=8 (measured from path-51417f23/export)
CHECKPOINT_18=${CHECKPOINT_18:-''}
# checkpoint ijepa-start: digest 35eacad9fab34b4ad9c349afeb5ef18843c5d03e6dd58cceb8fc6b2980d90486, trained by ijepa, recipe 32px with batch=64 lr=0.003 min_keep=1 patch_size=8 (measured from path-51417f23/start)
CHECKPOINT_19=${CHECKPOINT_19:-''}
# checkpoint lejepa: digest 9571d6648f7804f79c1ec8a376e1adddfb81118436a4d021cdc8050a5532abc2, trained by lejepa, recipe 32px with batch=64 lr=0.000667 patch_size=8 (measured from path-7d354792/export)
CHECKPOINT_20=${CHECKPOINT_20:-''}
# checkpoint lejepa-start: digest 3f88a2418007070e0fe24fae803e943877387693dcc1b9d3a7137b3122ffaf0d, trained by lejepa, recipe 32px with batch=64 lr=0.000667 patch_size=8 (measured from path-7d354792/start)
CHECKPOINT_21=${CHECKPOINT_21:-''}
# checkpoint lut: digest 3c4d3fe28f30132204836255f42deb38227f582f3e4eb07186cc4a0f0f0e656a, trained by lut, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-79a29805/export)
CHECKPOINT_22=${CHECKPOINT_22:-''}
# checkpoint lut-start: digest 125726397fc5d1295f37d85791276977076bd16f532181ec069b07486cd20deb, trained by lut, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-79a29805/start)
CHECKPOINT_23=${CHECKPOINT_23:-''}
# checkpoint mae: digest 490d8d2141ea37d46f57ecca5a24047365bc54b2f43ab4cab4eae3ab41293dba, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-4fef8a97/export)
CHECKPOINT_24=${CHECKPOINT_24:-''}
# checkpoint maskfeat: digest b80d5dbef11a0dd4fa009b2454edc23a178a19cce6476dcb252f93e275c336ed, trained by maskfeat, recipe 32px with batch=64 lr=0.000333 hog_cell=8 patch_size=8 (measured from path-7ba915be/export)
CHECKPOINT_25=${CHECKPOINT_25:-''}
# checkpoint maskfeat-start: digest a153be019a544821d34c0c264e2f762b657898455e8d1e5fb89550973dd5452c, trained by maskfeat, recipe 32px with batch=64 lr=0.000333 hog_cell=8 patch_size=8 (measured from path-7ba915be/start)
CHECKPOINT_26=${CHECKPOINT_26:-''}
# checkpoint moca: digest b91d96b941cfab395afd7c522b9c3a832f93d3964c29dd9a21eb19155bdffc77, trained by moca, recipe 32px with lr=0.003 patch_size=8 (measured from path-56bd6a19/export)
CHECKPOINT_27=${CHECKPOINT_27:-''}
# checkpoint moca-start: digest dd684b8da885500dd69cec4d32a67c14f4bcde66922895084b128f8400a513d7, trained by moca, recipe 32px with lr=0.003 patch_size=8 (measured from path-56bd6a19/start)
CHECKPOINT_28=${CHECKPOINT_28:-''}
# checkpoint mocov3: digest 995c791ee74f6bae9bfc56f08d3f92b65e6d0ac961664d57723cf8992e11cfe2, trained by mocov3, recipe 32px with batch=64 lr=0.003 patch_size=8 (measured from path-4a2714ec/export)
CHECKPOINT_29=${CHECKPOINT_29:-''}
# checkpoint mocov3-start: digest eaf8d00c8f4c89729af24eff6aef54da9df23fe9e333a145788ced27516a2a6a, trained by mocov3, recipe 32px with batch=64 lr=0.003 patch_size=8 (measured from path-4a2714ec/start)
CHECKPOINT_30=${CHECKPOINT_30:-''}
# checkpoint msn: digest d7d00b2d06cceb60a85fe6c607af5cfc4597ec58e07d3bc4c529dc9b5cd58c41, trained by msn, recipe 32px with patch_size=8 (measured from path-d976b939/export)
CHECKPOINT_31=${CHECKPOINT_31:-''}
# checkpoint msn-start: digest 77b06be7ba38aed4273b8399f27ca1739ba0b2e55c24441aebc4122fc7076325, trained by msn, recipe 32px with patch_size=8 (measured from path-d976b939/start)
CHECKPOINT_32=${CHECKPOINT_32:-''}
# checkpoint mst: digest e6c80a17d1e2c5db0b4ca3e6e8f399d72fbde6e287c50765ba9eca6919a286f3, trained by mst, recipe 32px with patch_size=8 (measured from path-b1c9aea1/export)
CHECKPOINT_33=${CHECKPOINT_33:-''}
# checkpoint mst-start: digest e5ecc06e665a6f7d7ddfb166dc1d64d89997caecf9054d7888dfae52b444e2e6, trained by mst, recipe 32px with patch_size=8 (measured from path-b1c9aea1/start)
CHECKPOINT_34=${CHECKPOINT_34:-''}
# checkpoint nepa: digest f28e520e7312c22403edc9fc4bdaf6f06acc9c322cc71d61ff03fd459c7a7a1a, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-79256e78/export)
CHECKPOINT_35=${CHECKPOINT_35:-''}
# checkpoint nepa-start: digest 31bde11bc440d6bfc237df07f718f25b234803f5dd5e7f83cd2e8afd3fcd762d, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-79256e78/start)
CHECKPOINT_36=${CHECKPOINT_36:-''}
# checkpoint pixels-32: digest edc3ac5b890f15c626ded6de7dc0a5d8c370f5710544d94e377d955da3933a21
CHECKPOINT_37=${CHECKPOINT_37:-pixels:32}
# checkpoint simdino: digest 1ff3124e24e8a414b8563a6b180b200a636c3a764808b64f622a72e3e3f49c9a, trained by simdino, recipe 32px with lr=0.000333 patch_size=8 (measured from path-3123e5bc/export)
CHECKPOINT_38=${CHECKPOINT_38:-''}
# checkpoint simdinov2: digest b56df30088bf98e128dc815aeb1dfb319bede2564a0202ccba910d099a544247, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-0caa28ea/export)
CHECKPOINT_39=${CHECKPOINT_39:-''}
# checkpoint simdinov2-start: digest 587482d7a06da4e4d93bbfaa7e6510896c03ece863ef89b9689852852804e82f, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-0caa28ea/start)
CHECKPOINT_40=${CHECKPOINT_40:-''}
# checkpoint simmim: digest 6191dba6571132087f5fb71d4542490264f8db2c3a4f7a067db3d92dc1b344d3, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-45adc85b/export)
CHECKPOINT_41=${CHECKPOINT_41:-''}
# checkpoint simmim-start: digest ebaf7f1d7df182954133e674d0682d26f7fd246893affe3f6497512db534b77f, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-45adc85b/start)
CHECKPOINT_42=${CHECKPOINT_42:-''}
# checkpoint supervised: digest 90521497465056141c5fe56a6004d7160c4fa9700d5cf4db75aa5ab090b9a42d, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-1b47a0b1/export)
CHECKPOINT_43=${CHECKPOINT_43:-''}
# checkpoint supervised-start: digest 293560a9cff42425b34a0352969cc9d945ad38be038e0b0443297e7d3ea36ad6, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-1b47a0b1/start)
CHECKPOINT_44=${CHECKPOINT_44:-''}
# images cifar10: fingerprints train 79c2e807e0fc, val a71ed4ae4831 (measured from cifar10:path-34a2a48f/cifar)
IMAGES_1=${IMAGES_1:-''}

for place in CHECKPOINT_1 CHECKPOINT_2 CHECKPOINT_3 CHECKPOINT_4 CHECKPOINT_5 CHECKPOINT_6 CHECKPOINT_7 CHECKPOINT_8 CHECKPOINT_9 CHECKPOINT_10 CHECKPOINT_11 CHECKPOINT_12 CHECKPOINT_13 CHECKPOINT_14 CHECKPOINT_15 CHECKPOINT_16 CHECKPOINT_17 CHECKPOINT_18 CHECKPOINT_19 CHECKPOINT_20 CHECKPOINT_21 CHECKPOINT_22 CHECKPOINT_23 CHECKPOINT_24 CHECKPOINT_25 CHECKPOINT_26 CHECKPOINT_27 CHECKPOINT_28 CHECKPOINT_29 CHECKPOINT_30 CHECKPOINT_31 CHECKPOINT_32 CHECKPOINT_33 CHECKPOINT_34 CHECKPOINT_35 CHECKPOINT_36 CHECKPOINT_37 CHECKPOINT_38 CHECKPOINT_39 CHECKPOINT_40 CHECKPOINT_41 CHECKPOINT_42 CHECKPOINT_43 CHECKPOINT_44 IMAGES_1; do
  [ -n "${!place}" ] || { echo "commands.sh: say at its top where $place is" >&2; exit 2; }
done
set -e

bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_4" --name byol-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_4" --name byol-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_4" --name byol-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_6" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_6" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_6" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_6" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_8" --name capi --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_8" --name capi --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_8" --name capi --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_8" --name capi --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_8" --name capi --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_8" --name capi --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_9" --name capi-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_9" --name capi-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_9" --name capi-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_10" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_10" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_10" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_10" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_10" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_10" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_11" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_11" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_11" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_11" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_11" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_11" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_12" --name dino-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_12" --name dino-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_12" --name dino-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_13" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_13" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_13" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_13" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_13" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_13" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_14" --name dinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_14" --name dinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_14" --name dinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_15" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_15" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_15" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_15" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_15" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_15" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_16" --name extrema-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_16" --name extrema-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_16" --name extrema-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_16" --name extrema-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_17" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_17" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_17" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_17" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_17" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_17" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_18" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_18" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_18" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_18" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_18" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_18" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_19" --name ijepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_19" --name ijepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_19" --name ijepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_20" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_20" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_20" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_20" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_20" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_20" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_21" --name lejepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_21" --name lejepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_21" --name lejepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_22" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_22" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_22" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_22" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_22" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_22" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_23" --name lut-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_23" --name lut-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_23" --name lut-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_23" --name lut-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_24" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_24" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_24" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_24" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_24" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_24" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_25" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_25" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_25" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_25" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_25" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_25" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_26" --name maskfeat-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_26" --name maskfeat-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_26" --name maskfeat-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_27" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_27" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_27" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_27" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_27" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_27" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_28" --name moca-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_28" --name moca-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_28" --name moca-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_29" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_29" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_29" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_29" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_29" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_29" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_30" --name mocov3-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_30" --name mocov3-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_30" --name mocov3-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_31" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_31" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_31" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_31" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_31" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_31" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_32" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_32" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_32" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_34" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_34" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_34" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_36" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_36" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_36" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_37" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_37" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_37" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_39" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_39" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_39" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_39" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_39" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_39" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_40" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_40" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_40" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_41" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_41" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_41" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_41" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_41" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_41" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_42" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_42" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_42" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_43" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set attentive@smoke.lrs=0.0005,0.002,0.005 attentive@smoke.batch=128 attentive@smoke.epochs=20 attentive@smoke.attention_heads=4 --suite attentive@smoke --out results
bench run --checkpoint "$CHECKPOINT_43" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=10 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_43" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_43" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_43" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_43" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_44" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_44" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_44" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
