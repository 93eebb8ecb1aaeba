import pytest
import torch

from lockstep.errors import UsageError
from tests.models.samples import images, vae


@pytest.mark.parametrize(("size", "channels"), [(16, 1), (32, 3), (48, 2)])
def test_the_image_comes_back_in_its_size(size: int, channels: int) -> None:
    model = vae(image_size=size, channels=channels, latent_dim=7)
    outputs = model(torch.rand(2, channels, size, size))
    assert outputs["reconstruction"].shape == (2, channels, size, size)
    assert 0 <= outputs["reconstruction"].min() <= outputs["reconstruction"].max() <= 1
    assert outputs["mu"].shape == outputs["log_var"].shape == (2, 7)


def test_the_loss_is_its_formula() -> None:
    model = vae(beta=0.5)
    batch = images(4)
    outputs = model(*model.inputs(batch))
    squared = (outputs["reconstruction"] - batch["image"]).pow(2).sum()
    mu = outputs["mu"]
    log_var = outputs["log_var"]
    kl = torch.distributions.kl_divergence(
        torch.distributions.Normal(mu, (0.5 * log_var).exp()), torch.distributions.Normal(0.0, 1.0)
    ).sum()
    torch.testing.assert_close(model.loss(outputs, batch), squared + 0.5 * kl)
    torch.testing.assert_close(outputs["loss"], (squared + 0.5 * kl) / 4)
    assert model.count(batch) == 4


def test_outputs_of_the_last_segment_have_the_same_loss() -> None:
    model = vae()
    batch = images()
    outputs = model(*model.inputs(batch))
    as_stage = (outputs["reconstruction"], outputs["mu"], outputs["log_var"])
    assert torch.equal(model.loss(as_stage, batch), model.loss(outputs, batch))


def test_the_latent_is_drawn_around_mu() -> None:
    torch.manual_seed(0)
    latent = vae(latent_dim=2).latent
    with torch.no_grad():
        for linear in (latent.mu, latent.log_var):
            linear.weight.zero_()
        latent.mu.bias.copy_(torch.tensor([1.0, -2.0]))
        latent.log_var.bias.copy_(torch.tensor([0.0, 2.0]))
        latent.expand.weight.copy_(torch.eye(256, 2))
        latent.expand.bias.zero_()
        z = latent(torch.zeros(4000, 256, 1, 1))[0][:, :2]
    torch.testing.assert_close(z.mean(0), torch.tensor([1.0, -2.0]), atol=0.1, rtol=0)
    torch.testing.assert_close(z.std(0), torch.tensor([1.0, 2.718]), atol=0.1, rtol=0)


@pytest.mark.parametrize("size", [8, 28, 40])
def test_sizes_that_four_halvings_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(
        UsageError, match=rf"image_size={size} is not a multiple of 16[\s\S]*resize the images to"
    ):
        vae(image_size=size)
