#!/usr/bin/env bash
# The commands that make the results of this record again, one after another.
#
# First say where your checkpoints and images are: between the quotes, or by variables of the environment, as in
# `CHECKPOINT_1=dino:/data/a.pth bash commands.sh`. `bench inspect X` shows the digest of a checkpoint.
#
# checkpoint beit: digest e921ef99686ed961f73f5c233a0ba8dfb2ecae54872e1f52ef8ed1e009bf64c9, trained by beit, recipe 32px with batch=64 lr=0.000667 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-7df97a74/export)
CHECKPOINT_1=${CHECKPOINT_1:-''}
# checkpoint beit-start: digest d8cca9ac85b5a27c92d85d01f25596b5f1e1b6ebf6fc69aea40e42f8daa8be14, trained by beit, recipe 32px with batch=64 lr=0.000667 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-7df97a74/start)
CHECKPOINT_2=${CHECKPOINT_2:-''}
# checkpoint byol: digest f861457e8d59ea50cc7177455da269b9172a4e5532793bff0110e87a4c790c51, trained by byol, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-ddc9c96c/export)
CHECKPOINT_3=${CHECKPOINT_3:-''}
# checkpoint byol-start: digest 2d291996b09f88e93c34050d7fe4601f8c71e8338681fe8f016a56be2a12cc8e, trained by byol, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-ddc9c96c/start)
CHECKPOINT_4=${CHECKPOINT_4:-''}
# checkpoint cae: digest 3611c1fe93c2caa2bed2a1eb9fa8aabff11642665633afd9892f62092772c83d, trained by cae, recipe 32px with batch=64 lr=0.000667 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-c914766a/export)
CHECKPOINT_5=${CHECKPOINT_5:-''}
# checkpoint cae-start: digest ec02321b681c9f48f02e5bc24c93c654e05908b60d75f4c68831831dd978606f, trained by cae, recipe 32px with batch=64 lr=0.000667 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-c914766a/start)
CHECKPOINT_6=${CHECKPOINT_6:-''}
# checkpoint can: digest 5edbb0f5164d1e06202a8153df6b33941e553fe8bba285b8bfa0410e92cdae6a, trained by can, recipe 32px with batch=64 patch_size=8 (measured from path-2823ad2e/export)
CHECKPOINT_7=${CHECKPOINT_7:-''}
# checkpoint data2vec: digest 930e9eface90beca4cc9d40ff6824a130f68f1e3832c58df372512c96a82e760, trained by data2vec, recipe 32px with batch=64 num_mask_patches=10 min_mask_patches_per_block=2 patch_size=8 (measured from path-3688f21b/export)
CHECKPOINT_8=${CHECKPOINT_8:-''}
# checkpoint dino: digest a24f56883cf16f29ef3240b1d6ca9e8e35c52b241a426d77130867c42e31d94c, trained by dino, recipe 32px with lr=0.003 patch_size=8 (measured from path-ae1ff987/export)
CHECKPOINT_9=${CHECKPOINT_9:-''}
# checkpoint dino-start: digest a59ad85269c4b3ec7c85057a40384ce4ad84d8f298a8ca1f671a20e54a25af99, trained by dino, recipe 32px with lr=0.003 patch_size=8 (measured from path-ae1ff987/start)
CHECKPOINT_10=${CHECKPOINT_10:-''}
# checkpoint dinov2: digest a596102b3a023f639ef0e96c7181553dd5a6fc380a0530a951adf310343eaeb1, trained by dinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-416484d0/export)
CHECKPOINT_11=${CHECKPOINT_11:-''}
# checkpoint dinov2-start: digest e9e6ee9c10e760d9ee7752607f175fdbaa39ec255779ce0704ac2d3595eee7f9, trained by dinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-416484d0/start)
CHECKPOINT_12=${CHECKPOINT_12:-''}
# checkpoint extrema: digest 45c595c341c345a653cc3068847591ccedcf327bb0a84f655886b21b9401e9b6, trained by extrema, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-bfc2908e/export)
CHECKPOINT_13=${CHECKPOINT_13:-''}
# checkpoint extrema-start: digest dd111b05e73929149b44afaebd414ee6154b486cc4f7a7f4e2ac004994bce2d9, trained by extrema, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-bfc2908e/start)
CHECKPOINT_14=${CHECKPOINT_14:-''}
# checkpoint ibot: digest 1d4e493d419f2d394b528f3ae42011231ede7b90e716080986da359377463672, trained by ibot, recipe 32px with lr=0.003 patch_size=8 (measured from path-2a44f38a/export)
CHECKPOINT_15=${CHECKPOINT_15:-''}
# checkpoint ijepa: digest b4eed599c4410e58c1e950c2143ccc201f6b2413d0ea70d3b24c3daa78370c47, trained by ijepa, recipe 32px with batch=64 lr=0.003 min_keep=1 patch_size=8 (measured from path-feed7d35/export)
CHECKPOINT_16=${CHECKPOINT_16:-''}
# checkpoint ijepa-start: digest 35eacad9fab34b4ad9c349afeb5ef18843c5d03e6dd58cceb8fc6b2980d90486, trained by ijepa, recipe 32px with batch=64 lr=0.003 min_keep=1 patch_size=8 (measured from path-feed7d35/start)
CHECKPOINT_17=${CHECKPOINT_17:-''}
# checkpoint lejepa: digest 4576591e0d1e2997bdb052309e6032bb03e9be61b5aebe334acdd98c950c6dd9, trained by lejepa, recipe 32px with batch=64 lr=0.000667 patch_size=8 (measured from path-0c98d9fd/export)
CHECKPOINT_18=${CHECKPOINT_18:-''}
# checkpoint lejepa-start: digest 3f88a2418007070e0fe24fae803e943877387693dcc1b9d3a7137b3122ffaf0d, trained by lejepa, recipe 32px with batch=64 lr=0.000667 patch_size=8 (measured from path-0c98d9fd/start)
CHECKPOINT_19=${CHECKPOINT_19:-''}
# checkpoint lut: digest ea26ef9de8b85cd874dbe9b8f518bf4662dbd117c87d970dd229ff16b57b3495, trained by lut, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-7d0afa86/export)
CHECKPOINT_20=${CHECKPOINT_20:-''}
# checkpoint lut-start: digest 125726397fc5d1295f37d85791276977076bd16f532181ec069b07486cd20deb, trained by lut, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-7d0afa86/start)
CHECKPOINT_21=${CHECKPOINT_21:-''}
# checkpoint mae: digest 0c3f662ef06ff097c8c209e783b3e055be43a79de5f24402f413fde91e9dc303, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-e750e92b/export)
CHECKPOINT_22=${CHECKPOINT_22:-''}
# checkpoint maskfeat: digest 01f382c7d5f1929b4070c4b2e2f6d09ae6838d3faa82b0d7580252bb3319671a, trained by maskfeat, recipe 32px with batch=64 hog_cell=8 patch_size=8 (measured from path-6ffa0a3e/export)
CHECKPOINT_23=${CHECKPOINT_23:-''}
# checkpoint maskfeat-start: digest a153be019a544821d34c0c264e2f762b657898455e8d1e5fb89550973dd5452c, trained by maskfeat, recipe 32px with batch=64 hog_cell=8 patch_size=8 (measured from path-6ffa0a3e/start)
CHECKPOINT_24=${CHECKPOINT_24:-''}
# checkpoint moca: digest 1c21666d76497fbbf55e9faa35f844f3941f8cea0246f6329bbe4200a46d35f1, trained by moca, recipe 32px with patch_size=8 (measured from path-a154d7a9/export)
CHECKPOINT_25=${CHECKPOINT_25:-''}
# checkpoint moca-start: digest dd684b8da885500dd69cec4d32a67c14f4bcde66922895084b128f8400a513d7, trained by moca, recipe 32px with patch_size=8 (measured from path-a154d7a9/start)
CHECKPOINT_26=${CHECKPOINT_26:-''}
# checkpoint mocov3: digest 9dbb2ae034927cfacea95967eeac0260dc4ebb8f7772a99ffa51b0430860a54d, trained by mocov3, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-e518feb0/export)
CHECKPOINT_27=${CHECKPOINT_27:-''}
# checkpoint mocov3-start: digest eaf8d00c8f4c89729af24eff6aef54da9df23fe9e333a145788ced27516a2a6a, trained by mocov3, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-e518feb0/start)
CHECKPOINT_28=${CHECKPOINT_28:-''}
# checkpoint msn: digest 66a339b508b4992ada91a250b62d67b6527d04f7694f3769b554c41a4325faa7, trained by msn, recipe 32px with lr=0.000333 patch_size=8 (measured from path-5efddfc6/export)
CHECKPOINT_29=${CHECKPOINT_29:-''}
# checkpoint msn-start: digest 77b06be7ba38aed4273b8399f27ca1739ba0b2e55c24441aebc4122fc7076325, trained by msn, recipe 32px with lr=0.000333 patch_size=8 (measured from path-5efddfc6/start)
CHECKPOINT_30=${CHECKPOINT_30:-''}
# checkpoint mst: digest 01249ba96f13a0d10878af3cb6e576b3f476c0b0362f470efe130ae8d3df1c99, trained by mst, recipe 32px with patch_size=8 (measured from path-84a8a0e2/export)
CHECKPOINT_31=${CHECKPOINT_31:-''}
# checkpoint mst-start: digest e5ecc06e665a6f7d7ddfb166dc1d64d89997caecf9054d7888dfae52b444e2e6, trained by mst, recipe 32px with patch_size=8 (measured from path-84a8a0e2/start)
CHECKPOINT_32=${CHECKPOINT_32:-''}
# checkpoint nepa: digest a856de15a519041e19ccf662ef31140b4631fec82e4cf82f8470ae8b2fbd9277, trained by nepa, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-7445d8bb/export)
CHECKPOINT_33=${CHECKPOINT_33:-''}
# checkpoint nepa-start: digest 31bde11bc440d6bfc237df07f718f25b234803f5dd5e7f83cd2e8afd3fcd762d, trained by nepa, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-7445d8bb/start)
CHECKPOINT_34=${CHECKPOINT_34:-''}
# checkpoint pixels-32: digest edc3ac5b890f15c626ded6de7dc0a5d8c370f5710544d94e377d955da3933a21
CHECKPOINT_35=${CHECKPOINT_35:-pixels:32}
# checkpoint simdino: digest 5ec26e973bcb56691a0babbd17c919f7e45383c58d642d1552eacc6b401053df, trained by simdino, recipe 32px with patch_size=8 (measured from path-e6aca8b4/export)
CHECKPOINT_36=${CHECKPOINT_36:-''}
# checkpoint simdinov2: digest 692a48554a5439866e59ce1507221a6dc9865b0a580c203ceb840e9afa8d8fba, trained by simdinov2, recipe 32px with patch_size=8 (measured from path-6419b5e5/export)
CHECKPOINT_37=${CHECKPOINT_37:-''}
# checkpoint simdinov2-start: digest 587482d7a06da4e4d93bbfaa7e6510896c03ece863ef89b9689852852804e82f, trained by simdinov2, recipe 32px with patch_size=8 (measured from path-6419b5e5/start)
CHECKPOINT_38=${CHECKPOINT_38:-''}
# checkpoint simmim: digest 2c284b9f3584a9e909198453dd3dda1ef73badf723a89e4dc96c43bdca7955e1, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-1149b142/export)
CHECKPOINT_39=${CHECKPOINT_39:-''}
# checkpoint simmim-start: digest ebaf7f1d7df182954133e674d0682d26f7fd246893affe3f6497512db534b77f, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-1149b142/start)
CHECKPOINT_40=${CHECKPOINT_40:-''}
# checkpoint supervised: digest 030c90a50e6c1a18ef113fdba47d023bc9d757c3017b19d8097f1e42294df062, trained by supervised, recipe 32px with batch=64 patch_size=8 (measured from path-28cc308d/export)
CHECKPOINT_41=${CHECKPOINT_41:-''}
# checkpoint supervised-start: digest 293560a9cff42425b34a0352969cc9d945ad38be038e0b0443297e7d3ea36ad6, trained by supervised, recipe 32px with batch=64 patch_size=8 (measured from path-28cc308d/start)
CHECKPOINT_42=${CHECKPOINT_42:-''}
# images cifar10: fingerprints train 79c2e807e0fc, val a71ed4ae4831 (measured from cifar10:path-34a2a48f/cifar)
IMAGES_1=${IMAGES_1:-''}

for place in CHECKPOINT_1 CHECKPOINT_2 CHECKPOINT_3 CHECKPOINT_4 CHECKPOINT_5 CHECKPOINT_6 CHECKPOINT_7 CHECKPOINT_8 CHECKPOINT_9 CHECKPOINT_10 CHECKPOINT_11 CHECKPOINT_12 CHECKPOINT_13 CHECKPOINT_14 CHECKPOINT_15 CHECKPOINT_16 CHECKPOINT_17 CHECKPOINT_18 CHECKPOINT_19 CHECKPOINT_20 CHECKPOINT_21 CHECKPOINT_22 CHECKPOINT_23 CHECKPOINT_24 CHECKPOINT_25 CHECKPOINT_26 CHECKPOINT_27 CHECKPOINT_28 CHECKPOINT_29 CHECKPOINT_30 CHECKPOINT_31 CHECKPOINT_32 CHECKPOINT_33 CHECKPOINT_34 CHECKPOINT_35 CHECKPOINT_36 CHECKPOINT_37 CHECKPOINT_38 CHECKPOINT_39 CHECKPOINT_40 CHECKPOINT_41 CHECKPOINT_42 IMAGES_1; do
  [ -n "${!place}" ] || { echo "commands.sh: say at its top where $place is" >&2; exit 2; }
done
set -e

bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_3" --name byol --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_4" --name byol-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_4" --name byol-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_4" --name byol-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_5" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_6" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_6" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_6" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_7" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_8" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_8" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_8" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_8" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_8" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_8" --name data2vec --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_9" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_9" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_9" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_9" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_9" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_9" --name dino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_10" --name dino-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_10" --name dino-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_10" --name dino-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_11" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_11" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_11" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_11" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_11" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_11" --name dinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_12" --name dinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_12" --name dinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_12" --name dinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_13" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_13" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_13" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_13" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_13" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_13" --name extrema --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_14" --name extrema-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_14" --name extrema-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_14" --name extrema-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_15" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_15" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_15" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_15" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_15" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_15" --name ibot --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_16" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_16" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_16" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_16" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_16" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_16" --name ijepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_17" --name ijepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_17" --name ijepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_17" --name ijepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_18" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_18" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_18" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_18" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_18" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_18" --name lejepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_19" --name lejepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_19" --name lejepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_19" --name lejepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_20" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_20" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_20" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_20" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_20" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_20" --name lut --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_21" --name lut-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_21" --name lut-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_21" --name lut-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_22" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_22" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_22" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_22" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_22" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_22" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_23" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_23" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_23" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_23" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_23" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_23" --name maskfeat --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_24" --name maskfeat-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_24" --name maskfeat-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_24" --name maskfeat-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_25" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_25" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_25" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_25" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_25" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_25" --name moca --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_26" --name moca-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_26" --name moca-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_26" --name moca-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_27" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_27" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_27" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_27" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_27" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_27" --name mocov3 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_28" --name mocov3-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_28" --name mocov3-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_28" --name mocov3-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_29" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_29" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_29" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_29" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_29" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_29" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_30" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_30" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_30" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_32" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_32" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_32" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_33" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_33" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_33" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_33" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_33" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_33" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_34" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_34" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_34" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_35" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_35" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_35" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_36" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_36" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_36" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_36" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_36" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_36" --name simdino --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_37" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_37" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_37" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_37" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_37" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_37" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_38" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_39" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_39" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_39" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_39" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_39" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_39" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_40" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_40" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_40" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_41" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set finetune@smoke.batch=64 finetune@smoke.epochs=2 --suite finetune@smoke --out results
bench run --checkpoint "$CHECKPOINT_41" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --suite health@val,lowshot@bench --out results
bench run --checkpoint "$CHECKPOINT_41" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_41" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_41" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_41" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set robustness@cached.batch=256 robustness@cached.epochs=20 robustness@cached.images=50 --suite robustness@cached --out results
bench run --checkpoint "$CHECKPOINT_42" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_42" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_42" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
