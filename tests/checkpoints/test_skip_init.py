"""Networks built without drawing initial weights differ only in weights that a file replaces."""

import pytest
import timm
import torch

from checkpoints.vit import skip_init

SMALL = dict(img_size=32, embed_dim=32, depth=2, num_heads=4)
NAMES = ["vit_base_patch16_224", "beit_base_patch16_224", "eva02_base_patch16_clip_224", "vit_small_patch16_dinov3"]


@pytest.mark.parametrize("name", NAMES)
def test_after_loading_the_network_equals_one_with_drawn_weights(name):
    """Including buffers that no file holds, such as positions; the random generator is not used."""
    drawn, images = timm.create_model(name, **SMALL).eval(), torch.randn(2, 3, 32, 32)
    generator_state = torch.random.get_rng_state()
    with skip_init():
        network = timm.create_model(name, **SMALL).eval()
    assert torch.equal(torch.random.get_rng_state(), generator_state)
    network.load_state_dict(drawn.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(network.forward_features(images), drawn.forward_features(images))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_the_same_on_the_meta_device(name):
    with torch.device("meta"), skip_init():
        network = timm.create_model(name, **SMALL)
    shapes = {key: tensor.shape for key, tensor in timm.create_model(name, **SMALL).state_dict().items()}
    assert {key: tensor.shape for key, tensor in network.state_dict().items()} == shapes
    assert all(tensor.is_meta for tensor in network.state_dict().values())
