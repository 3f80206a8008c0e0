"""What the image processors of all families do alike: read an image of any kind, on either backend."""

from transformers.image_processing_backends import TorchvisionBackend
from transformers.utils import is_torchvision_available

from .media_loading import flat_media, is_image, open_image, open_nested, read_pixels


class ReadsAnyImage:
    """Base of the rules that both backends of a family share: paths, URLs, bytes, base64, PIL, numpy, torch."""

    def fetch_images(self, images):
        return open_nested(images, open_image, "image")

    def _prepare_images_structure(self, images, expected_ndims=3):
        if not (flat := flat_media(self.fetch_images(images), is_image)):
            raise ValueError("no image to process; pass at least one")
        return flat


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
