#!/usr/bin/env bash
# The commands that make the results of this record again, one after another.
#
# First say where your checkpoints and images are: between the quotes, or by variables of the environment, as in
# `CHECKPOINT_1=dino:/data/a.pth bash commands.sh`. `bench inspect X` shows the digest of a checkpoint.
#
# checkpoint beit: digest 1470f7408ddd613be0ec8dec0be9b899f23f41becb5b9653c8a43273f52ad765, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-c63306bb/export)
CHECKPOINT_1=${CHECKPOINT_1:-''}
# checkpoint beit-seed1: digest 8cd19a48e5a3a076abeb1a38cfcc4720abd67e1eb51c821c711d01bcda135d5b, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-cc86a686/export)
CHECKPOINT_2=${CHECKPOINT_2:-''}
# checkpoint beit-seed1-start: digest e1572509431dcdc697824a62b11c0b807e4b68e3a724c82b30932aa41b2b7459, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-cc86a686/start)
CHECKPOINT_3=${CHECKPOINT_3:-''}
# checkpoint beit-seed2: digest 96a772b28998c8ee2cd40229e2086ae281757cfb66d0b35f2a6d5652b9503229, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-0944eee5/export)
CHECKPOINT_4=${CHECKPOINT_4:-''}
# checkpoint beit-seed2-start: digest 1035cbbcc2c4be92ba74e701829521cc65db98c445b1d1d53248248598623710, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-0944eee5/start)
CHECKPOINT_5=${CHECKPOINT_5:-''}
# checkpoint beit-start: digest d8cca9ac85b5a27c92d85d01f25596b5f1e1b6ebf6fc69aea40e42f8daa8be14, trained by beit, recipe 32px with batch=64 num_mask_patches=6 min_mask_patches_per_block=2 patch_size=8 (measured from path-c63306bb/start)
CHECKPOINT_6=${CHECKPOINT_6:-''}
# checkpoint cae: digest 4d2ab891addf2cefd4c53183bf101393bbe3f5cd4d6428043720c51b96342d1d, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-13325c14/export)
CHECKPOINT_7=${CHECKPOINT_7:-''}
# checkpoint cae-seed1: digest bc7a2c7c41f99c77613ed4fffa8b15fd9a6dd8b1047b9c9c37f5f4768110d8c4, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-1ce579b4/export)
CHECKPOINT_8=${CHECKPOINT_8:-''}
# checkpoint cae-seed1-start: digest ebe20de6703cde6dced10aa420f3f3fb1433d56495ce7da1303d69fe01860885, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-1ce579b4/start)
CHECKPOINT_9=${CHECKPOINT_9:-''}
# checkpoint cae-seed2: digest 9ff8c117f9dba300ca25d192509301828c2abd175fe272768c4a6b005229fe22, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-8181980a/export)
CHECKPOINT_10=${CHECKPOINT_10:-''}
# checkpoint cae-seed2-start: digest a9bea753223016f9e0d5fbc4e841021310bb3663901503c30cb27a247945ec29, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-8181980a/start)
CHECKPOINT_11=${CHECKPOINT_11:-''}
# checkpoint cae-start: digest ec02321b681c9f48f02e5bc24c93c654e05908b60d75f4c68831831dd978606f, trained by cae, recipe 32px with batch=64 num_mask_patches=8 min_mask_patches_per_block=2 patch_size=8 (measured from path-13325c14/start)
CHECKPOINT_12=${CHECKPOINT_12:-''}
# checkpoint can: digest 8cf84cd97cba621c05308a200414069cd15457980574396967e12b1dfd3ea9dc, trained by can, recipe 32px with batch=64 patch_size=8 (measured from path-92b16931/export)
CHECKPOINT_13=${CHECKPOINT_13:-''}
# checkpoint can-seed1: digest 6eeb93c9b9def7074824cd6c9b05aed106d414f9421c0bc91a8d999818186dcd, trained by can, recipe 32px with batch=64 patch_size=8 (measured from path-346a73b7/export)
CHECKPOINT_14=${CHECKPOINT_14:-''}
# checkpoint can-seed2: digest 23ac6c6a752a2911f5f765c083f4d42e810a0076716ad750846a2c2c97d6fec8, trained by can, recipe 32px with batch=64 patch_size=8 (measured from path-1b69fc3f/export)
CHECKPOINT_15=${CHECKPOINT_15:-''}
# checkpoint mae: digest 490d8d2141ea37d46f57ecca5a24047365bc54b2f43ab4cab4eae3ab41293dba, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-4fef8a97/export)
CHECKPOINT_16=${CHECKPOINT_16:-''}
# checkpoint mae-seed1: digest 6451be5925fd9c18238c6431738240c0f94b8e3caae8f39d7b01329c9c31b0b0, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-769b5a55/export)
CHECKPOINT_17=${CHECKPOINT_17:-''}
# checkpoint mae-seed1-start: digest 20bfc70b22924058424645b81b70e3cb1f8ce29cc86edad2869174c43f65c14c, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-769b5a55/start)
CHECKPOINT_18=${CHECKPOINT_18:-''}
# checkpoint mae-seed2: digest 58a28a4fff8ecea542ff5b8fe2d7543cd83120bb1252c2e72f8f91ea7b48dce1, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-45645058/export)
CHECKPOINT_19=${CHECKPOINT_19:-''}
# checkpoint mae-seed2-start: digest 116bae503cb8bebc65d448ee5d8a777ef9e6c1c07d75c6f413e9f6c07524098b, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-45645058/start)
CHECKPOINT_20=${CHECKPOINT_20:-''}
# checkpoint mae-start: digest 125726397fc5d1295f37d85791276977076bd16f532181ec069b07486cd20deb, trained by mae, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-77d9b39e/start)
CHECKPOINT_21=${CHECKPOINT_21:-''}
# checkpoint msn: digest d7d00b2d06cceb60a85fe6c607af5cfc4597ec58e07d3bc4c529dc9b5cd58c41, trained by msn, recipe 32px with patch_size=8 (measured from path-d976b939/export)
CHECKPOINT_22=${CHECKPOINT_22:-''}
# checkpoint msn-seed1: digest 3ebf45132b42341c924c08bc91e0f78df63b0fc2af5fb82cc09cdf70c2b6c354, trained by msn, recipe 32px with patch_size=8 (measured from path-8441ebb1/export)
CHECKPOINT_23=${CHECKPOINT_23:-''}
# checkpoint msn-seed1-start: digest 589e7c2408868775632ad1485c3e6a38c7c6fd8e2684720d087d75e5d976539b, trained by msn, recipe 32px with patch_size=8 (measured from path-8441ebb1/start)
CHECKPOINT_24=${CHECKPOINT_24:-''}
# checkpoint msn-seed2: digest 24dd0e9577d8e4f8790b37503f7f476cf98d00ac6d952554e247c744ab1f92cf, trained by msn, recipe 32px with patch_size=8 (measured from path-dd3dca71/export)
CHECKPOINT_25=${CHECKPOINT_25:-''}
# checkpoint msn-seed2-start: digest 15b0d3c33e42e00fa549bec6c3a4c85f154b4d87186dbbb2750e4d6ee2679de4, trained by msn, recipe 32px with patch_size=8 (measured from path-dd3dca71/start)
CHECKPOINT_26=${CHECKPOINT_26:-''}
# checkpoint msn-start: digest 77b06be7ba38aed4273b8399f27ca1739ba0b2e55c24441aebc4122fc7076325, trained by msn, recipe 32px with patch_size=8 (measured from path-d976b939/start)
CHECKPOINT_27=${CHECKPOINT_27:-''}
# checkpoint mst: digest e6c80a17d1e2c5db0b4ca3e6e8f399d72fbde6e287c50765ba9eca6919a286f3, trained by mst, recipe 32px with patch_size=8 (measured from path-b1c9aea1/export)
CHECKPOINT_28=${CHECKPOINT_28:-''}
# checkpoint mst-seed1: digest abbbcbab2e87fd807a8d6ff26889ff0e0136c1bd221f1654f56fe39a289163a2, trained by mst, recipe 32px with patch_size=8 (measured from path-cb9577e2/export)
CHECKPOINT_29=${CHECKPOINT_29:-''}
# checkpoint mst-seed1-start: digest f5c7a257acc64c85d8dff4e6eae3dc8377d946a1bbbd9ba138637f10a4a6bd93, trained by mst, recipe 32px with patch_size=8 (measured from path-cb9577e2/start)
CHECKPOINT_30=${CHECKPOINT_30:-''}
# checkpoint mst-seed2: digest 8e603c4e143384aa075618a0f305e051b0fdc24059c1b5b6570d77342830bcdc, trained by mst, recipe 32px with patch_size=8 (measured from path-616f4c28/export)
CHECKPOINT_31=${CHECKPOINT_31:-''}
# checkpoint mst-seed2-start: digest 571790af039c3ce27a402726cdc5e4578643470d63a73187381506c8039a9138, trained by mst, recipe 32px with patch_size=8 (measured from path-616f4c28/start)
CHECKPOINT_32=${CHECKPOINT_32:-''}
# checkpoint mst-start: digest e5ecc06e665a6f7d7ddfb166dc1d64d89997caecf9054d7888dfae52b444e2e6, trained by mst, recipe 32px with patch_size=8 (measured from path-b1c9aea1/start)
CHECKPOINT_33=${CHECKPOINT_33:-''}
# checkpoint nepa: digest f28e520e7312c22403edc9fc4bdaf6f06acc9c322cc71d61ff03fd459c7a7a1a, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-79256e78/export)
CHECKPOINT_34=${CHECKPOINT_34:-''}
# checkpoint nepa-seed1: digest 04d8c2e8911360d40b016f500ed39fab9b4ed9af04a6260b2e3cbf3c548840a5, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-febad202/export)
CHECKPOINT_35=${CHECKPOINT_35:-''}
# checkpoint nepa-seed1-start: digest 82ee8510b4761865aa237e91c0e0109e37a20eb1c3f8084d247d64aa0bd0f15d, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-febad202/start)
CHECKPOINT_36=${CHECKPOINT_36:-''}
# checkpoint nepa-seed2: digest 451c99e9816c2d7c5a9bb477dd416fed456d0c4461b51ac0da2a8dde9f134941, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-728602ae/export)
CHECKPOINT_37=${CHECKPOINT_37:-''}
# checkpoint nepa-seed2-start: digest 608a0d9362cf316f56a875f86fb2ce43a013e6d3bf0a24eb82fb370bda975783, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-728602ae/start)
CHECKPOINT_38=${CHECKPOINT_38:-''}
# checkpoint nepa-start: digest 31bde11bc440d6bfc237df07f718f25b234803f5dd5e7f83cd2e8afd3fcd762d, trained by nepa, recipe 32px with batch=64 patch_size=8 (measured from path-79256e78/start)
CHECKPOINT_39=${CHECKPOINT_39:-''}
# checkpoint pixels-32: digest edc3ac5b890f15c626ded6de7dc0a5d8c370f5710544d94e377d955da3933a21
CHECKPOINT_40=${CHECKPOINT_40:-pixels:32}
# checkpoint simdinov2: digest b56df30088bf98e128dc815aeb1dfb319bede2564a0202ccba910d099a544247, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-0caa28ea/export)
CHECKPOINT_41=${CHECKPOINT_41:-''}
# checkpoint simdinov2-seed1: digest 4840281717d8ccb452be0c8bfc1deca3e3443e771d1b55a429fa110e392e48d0, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-0ac07576/export)
CHECKPOINT_42=${CHECKPOINT_42:-''}
# checkpoint simdinov2-seed1-start: digest 1e007d7c0fc1ae0c041a038fc59c4d1762c605d301eac888ed28e8db15e2869a, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-0ac07576/start)
CHECKPOINT_43=${CHECKPOINT_43:-''}
# checkpoint simdinov2-seed2: digest 8667aef0a16c90bfdb48d608c221819f7936e5df613ab651aa825ce3eca269d5, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-3ec36e7b/export)
CHECKPOINT_44=${CHECKPOINT_44:-''}
# checkpoint simdinov2-seed2-start: digest 908415ac5577c9be40f4a492fe27f33afb60aea02e9665ff6887015b3c691899, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-3ec36e7b/start)
CHECKPOINT_45=${CHECKPOINT_45:-''}
# checkpoint simdinov2-start: digest 587482d7a06da4e4d93bbfaa7e6510896c03ece863ef89b9689852852804e82f, trained by simdinov2, recipe 32px with lr=0.000333 patch_size=8 (measured from path-0caa28ea/start)
CHECKPOINT_46=${CHECKPOINT_46:-''}
# checkpoint simmim: digest 6191dba6571132087f5fb71d4542490264f8db2c3a4f7a067db3d92dc1b344d3, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-45adc85b/export)
CHECKPOINT_47=${CHECKPOINT_47:-''}
# checkpoint simmim-seed1: digest ca1fa19db0e153df7bba666fea3b5e86687898f4e43e0dda8b47f1c8216c249a, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-a8016fcf/export)
CHECKPOINT_48=${CHECKPOINT_48:-''}
# checkpoint simmim-seed1-start: digest 0022367592752ca4421dcc643c815d293e1299627a0b35c33eed33c85dc3e299, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-a8016fcf/start)
CHECKPOINT_49=${CHECKPOINT_49:-''}
# checkpoint simmim-seed2: digest 979d9a98535e208ac0abdb8fffebfcd57b1b87a6946aabd6423157efa1bff14c, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-832a7d51/export)
CHECKPOINT_50=${CHECKPOINT_50:-''}
# checkpoint simmim-seed2-start: digest 34716bf1d499d34483b5e92114bcc639340b9f0229d09dc64d94e68fd65581b6, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-832a7d51/start)
CHECKPOINT_51=${CHECKPOINT_51:-''}
# checkpoint simmim-start: digest ebaf7f1d7df182954133e674d0682d26f7fd246893affe3f6497512db534b77f, trained by simmim, recipe 32px with batch=64 patch_size=8 (measured from path-45adc85b/start)
CHECKPOINT_52=${CHECKPOINT_52:-''}
# checkpoint supervised: digest 90521497465056141c5fe56a6004d7160c4fa9700d5cf4db75aa5ab090b9a42d, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-1b47a0b1/export)
CHECKPOINT_53=${CHECKPOINT_53:-''}
# checkpoint supervised-seed1: digest 60fbab3aa626754a3b295679004ea490df784d241f95b60f44a54385e23a1d51, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-a4d32f77/export)
CHECKPOINT_54=${CHECKPOINT_54:-''}
# checkpoint supervised-seed1-start: digest d9ceb64688258bc5fac669c1032c97283a4e0f6d1943de457889a96068b639f6, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-a4d32f77/start)
CHECKPOINT_55=${CHECKPOINT_55:-''}
# checkpoint supervised-seed2: digest dfdc39e8f4b2c3ad299ba844dcad45f00f8e4aa422e58ef856558c185484e664, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-d48dd4ce/export)
CHECKPOINT_56=${CHECKPOINT_56:-''}
# checkpoint supervised-seed2-start: digest 08d4ba84b807857e06f2ed68ba6fc540f6ef75a96e5e0a73a747aff58975223b, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-d48dd4ce/start)
CHECKPOINT_57=${CHECKPOINT_57:-''}
# checkpoint supervised-start: digest 293560a9cff42425b34a0352969cc9d945ad38be038e0b0443297e7d3ea36ad6, trained by supervised, recipe 32px with batch=64 lr=0.000333 patch_size=8 (measured from path-1b47a0b1/start)
CHECKPOINT_58=${CHECKPOINT_58:-''}
# images cifar10: fingerprints train 79c2e807e0fc, val a71ed4ae4831 (measured from cifar10:path-34a2a48f/cifar)
IMAGES_1=${IMAGES_1:-''}

for place in CHECKPOINT_1 CHECKPOINT_2 CHECKPOINT_3 CHECKPOINT_4 CHECKPOINT_5 CHECKPOINT_6 CHECKPOINT_7 CHECKPOINT_8 CHECKPOINT_9 CHECKPOINT_10 CHECKPOINT_11 CHECKPOINT_12 CHECKPOINT_13 CHECKPOINT_14 CHECKPOINT_15 CHECKPOINT_16 CHECKPOINT_17 CHECKPOINT_18 CHECKPOINT_19 CHECKPOINT_20 CHECKPOINT_21 CHECKPOINT_22 CHECKPOINT_23 CHECKPOINT_24 CHECKPOINT_25 CHECKPOINT_26 CHECKPOINT_27 CHECKPOINT_28 CHECKPOINT_29 CHECKPOINT_30 CHECKPOINT_31 CHECKPOINT_32 CHECKPOINT_33 CHECKPOINT_34 CHECKPOINT_35 CHECKPOINT_36 CHECKPOINT_37 CHECKPOINT_38 CHECKPOINT_39 CHECKPOINT_40 CHECKPOINT_41 CHECKPOINT_42 CHECKPOINT_43 CHECKPOINT_44 CHECKPOINT_45 CHECKPOINT_46 CHECKPOINT_47 CHECKPOINT_48 CHECKPOINT_49 CHECKPOINT_50 CHECKPOINT_51 CHECKPOINT_52 CHECKPOINT_53 CHECKPOINT_54 CHECKPOINT_55 CHECKPOINT_56 CHECKPOINT_57 CHECKPOINT_58 IMAGES_1; do
  [ -n "${!place}" ] || { echo "commands.sh: say at its top where $place is" >&2; exit 2; }
done
set -e

bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_1" --name beit --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_2" --name beit-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_3" --name beit-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_3" --name beit-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_3" --name beit-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_4" --name beit-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_4" --name beit-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_4" --name beit-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_5" --name beit-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_5" --name beit-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_5" --name beit-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_6" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_6" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_6" --name beit-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_7" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_7" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_7" --name cae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_8" --name cae-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_8" --name cae-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_8" --name cae-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_9" --name cae-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_9" --name cae-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_9" --name cae-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_10" --name cae-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_10" --name cae-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_10" --name cae-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_11" --name cae-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_11" --name cae-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_11" --name cae-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_12" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_12" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_12" --name cae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_13" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_13" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_13" --name can --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_14" --name can-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_14" --name can-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_14" --name can-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_15" --name can-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_15" --name can-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_15" --name can-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_16" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_16" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_16" --name mae --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_17" --name mae-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_17" --name mae-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_17" --name mae-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_18" --name mae-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_18" --name mae-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_18" --name mae-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_19" --name mae-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_19" --name mae-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_19" --name mae-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_20" --name mae-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_20" --name mae-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_20" --name mae-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_21" --name mae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_21" --name mae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_21" --name mae-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_22" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_22" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_22" --name msn --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_23" --name msn-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_23" --name msn-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_23" --name msn-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_24" --name msn-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_24" --name msn-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_24" --name msn-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_25" --name msn-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_25" --name msn-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_25" --name msn-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_26" --name msn-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_26" --name msn-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_26" --name msn-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_27" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_27" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_27" --name msn-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_28" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_28" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_28" --name mst --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_29" --name mst-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_29" --name mst-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_29" --name mst-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_30" --name mst-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_30" --name mst-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_30" --name mst-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_31" --name mst-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_32" --name mst-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_32" --name mst-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_32" --name mst-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_33" --name mst-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_34" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_34" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_34" --name nepa --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_35" --name nepa-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_36" --name nepa-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_36" --name nepa-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_36" --name nepa-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_37" --name nepa-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_37" --name nepa-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_37" --name nepa-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_38" --name nepa-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_38" --name nepa-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_38" --name nepa-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_39" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_39" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_39" --name nepa-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_40" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_40" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_40" --name pixels-32 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_41" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_41" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_41" --name simdinov2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_42" --name simdinov2-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_42" --name simdinov2-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_42" --name simdinov2-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_43" --name simdinov2-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_43" --name simdinov2-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_43" --name simdinov2-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_44" --name simdinov2-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_44" --name simdinov2-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_44" --name simdinov2-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_45" --name simdinov2-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_45" --name simdinov2-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_45" --name simdinov2-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_46" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_46" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_46" --name simdinov2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_47" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_47" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_47" --name simmim --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_48" --name simmim-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_48" --name simmim-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_48" --name simmim-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_49" --name simmim-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_49" --name simmim-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_49" --name simmim-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_50" --name simmim-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_50" --name simmim-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_50" --name simmim-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_51" --name simmim-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_51" --name simmim-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_51" --name simmim-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_52" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_52" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_52" --name simmim-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_53" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_53" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_53" --name supervised --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_54" --name supervised-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_54" --name supervised-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_54" --name supervised-seed1 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_55" --name supervised-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_55" --name supervised-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_55" --name supervised-seed1-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_56" --name supervised-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_56" --name supervised-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_56" --name supervised-seed2 --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_57" --name supervised-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_57" --name supervised-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_57" --name supervised-seed2-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
bench run --checkpoint "$CHECKPOINT_58" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@dino.k=20 --suite knn@dino --out results
bench run --checkpoint "$CHECKPOINT_58" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set knn@moca.k=20 knn@moca.temperature=0.07 --suite knn@moca --out results
bench run --checkpoint "$CHECKPOINT_58" --name supervised-start --data cifar10="$IMAGES_1" --seed 0 --limit 2500 --set linear_sgd@ibot_base_cached.batch=256 linear_sgd@ibot_base_cached.epochs=20 --suite linear_sgd@ibot_base_cached --out results
