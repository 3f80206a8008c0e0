"""What the image processors of all families do alike: read an image of any kind, on either backend."""

from transformers.image_processing_backends import TorchvisionBackend
from transformers.utils import is_torchvision_available

from .media_loading import flat_media, is_image, open_image, open_nested, read_pixels

# Mean and deviation, of every channel, by which the towers of LFM3-VL and DeepSeek-V4 normalize uint8 patches.
HALF = 0.5


class ReadsAnyImage:
    """Base of the rules that both backends of a family share: paths, URLs, bytes, base64, PIL, numpy, torch."""

    def fetch_images(self, images):
        return open_nested(images, open_image, "image")

    def _prepare_images_structure(self, images, expected_ndims=3):
        if not (flat := flat_media(self.fetch_images(images), is_image)):
            raise ValueError("no image to process; pass at least one")
        return flat


def check_normalized_on_device(settings, statistics=None):
    """`settings` of a call or a config, after a check that a tower can do what `normalize_on_device` leaves to it.

    Args:
        settings: attributes by name.
        statistics: the mean and the deviation that the tower is bound to; None where its configuration has its own.

    Raises:
        ValueError: it is asked for without rescaling or normalizing, or by another mean or deviation.
    """
    if not settings.get("normalize_on_device"):
        return settings
    if not (settings["do_rescale"] and settings["do_normalize"]):
        raise ValueError(
            "normalize_on_device=True leaves rescaling and normalizing to the model, which does both; it cannot go with "
            f"do_rescale={settings['do_rescale']} and do_normalize={settings['do_normalize']}"
        )
    asked = {*settings["image_mean"], *settings["image_std"]}
    if statistics is not None and asked != {statistics}:
        raise ValueError(
            f"normalize_on_device=True leaves normalizing to the model, whose mean and deviation are {statistics}; it "
            f"cannot go with image_mean={settings['image_mean']} and image_std={settings['image_std']}"
        )
    return settings


class TorchvisionImages(TorchvisionBackend):
    """transformers' backend on torchvision, for 8-bit pixels on any device."""

    def __init__(self, **kwargs):
        if not is_torchvision_available():
            name = type(self).__name__
            raise ImportError(
                f"{name} needs torchvision: `pip install torchvision`. {name}Pil makes the same grids without it."
            )
        super().__init__(**kwargs)

    def process_image(self, image, do_rescale=True, input_data_format=None, device=None, **kwargs):
        pixels = read_pixels(image, do_rescale, input_data_format)
        return pixels if device is None else pixels.to(device)
