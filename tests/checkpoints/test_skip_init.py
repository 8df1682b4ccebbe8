"""Networks built without drawing their initial weights: the same in all but the weights that a file replaces."""

import pytest
import timm
import torch

from checkpoints.vit import skip_init

SMALL = dict(img_size=32, embed_dim=32, depth=2, num_heads=4)
NAMES = ["vit_base_patch16_224", "beit_base_patch16_224", "eva02_base_patch16_clip_224", "vit_small_patch16_dinov3"]


@pytest.mark.parametrize("name", NAMES)
def test_loaded_it_is_the_network_that_drew_its_weights(name):
    """Buffers that no file holds, such as positions, included; and no random generator has moved."""
    drawn, images = timm.create_model(name, **SMALL).eval(), torch.randn(2, 3, 32, 32)
    before = torch.random.get_rng_state()
    with skip_init():
        network = timm.create_model(name, **SMALL).eval()
    assert torch.equal(torch.random.get_rng_state(), before)
    network.load_state_dict(drawn.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(network.forward_features(images), drawn.forward_features(images))


@pytest.mark.parametrize("name", NAMES)
def test_without_memory_it_has_the_same_shapes(name):
    with torch.device("meta"), skip_init():
        network = timm.create_model(name, **SMALL)
    shapes = {where: tensor.shape for where, tensor in timm.create_model(name, **SMALL).state_dict().items()}
    assert {where: tensor.shape for where, tensor in network.state_dict().items()} == shapes
    assert all(tensor.is_meta for tensor in network.state_dict().values())
