"""What packed pixels forbid: to be cut with the rows of a batch."""


class TakesPackedPixels:
    """First base of towers and whole models, which `nn.DataParallel` must not replicate.

    transformers' `Trainer` wraps a model in it where one process sees several GPUs.
    """

    def _replicate_for_data_parallel(self):
        # torch asks every module for its copies this way, before any of them computes.
        raise ValueError(
            f"nn.DataParallel is about to cut the inputs of {type(self).__name__} into equal shares, and would part packed "
            "pixels from their grids and prompts; start one process for each GPU (torchrun, or accelerate launch), or let "
            "this one see a single GPU (CUDA_VISIBLE_DEVICES=0)."
        )
