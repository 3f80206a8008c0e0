"""Each family's smallest model with its processor, and pictures with prompts for them."""

import numpy as np
import PIL.Image
import torch
from transformers import PreTrainedTokenizerFast

from gridtower.configuration.configuration_deepseek_v4_vl import DeepseekV4VlConfig
from gridtower.configuration.configuration_lfm3_vl import Lfm3VlConfig
from gridtower.configuration.configuration_pixtral import PixtralConfig
from gridtower.modeling.modeling_deepseek_v4_vl import DeepseekV4ForConditionalGeneration
from gridtower.modeling.modeling_lfm3_vl import Lfm3VlForConditionalGeneration
from gridtower.processing.image_processing_deepseek_v4_vl import DeepseekV4ImageProcessor
from gridtower.processing.image_processing_lfm3_vl import Lfm3VlImageProcessor
from gridtower.processing.image_processing_pixtral import PixtralImageProcessor
from gridtower.processing.processing_deepseek_v4_vl import BLOCK_TOKENS, IMAGE_PLACEHOLDER, DeepseekV4Processor
from gridtower.processing.processing_lfm3_vl import Lfm3VlProcessor
from gridtower.processing.processing_pixtral import PixtralProcessor
from gridtower.processing.video_processing_lfm3_vl import Lfm3VlVideoProcessor

from ..modeling.lfm3_vl_cases import model_fields, tower_fields
from ..processing.conftest import VISION_TOKENS
from ..processing.test_processing_deepseek_v4_vl import make_tokenizer as make_deepseek_v4_tokenizer
from ..processing.test_processing_pixtral import make_tokenizer, tiny_model


def tiny_lfm3_vl():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=VISION_TOKENS,
    )
    images = Lfm3VlImageProcessor(patch_size=2, min_pixels=64, max_pixels=256)
    processor = Lfm3VlProcessor(images, tokenizer, Lfm3VlVideoProcessor(patch_size=2))
    ids = {f"{token}_id": getattr(processor, f"{token}_id") for token in VISION_TOKENS}
    fields = model_fields(tower_fields(), **ids)
    fields["text_config"] |= {"vocab_size": 300, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    return Lfm3VlForConditionalGeneration(Lfm3VlConfig(**fields)).eval(), processor


def tiny_pixtral():
    images = PixtralImageProcessor(patch_size=4, size={"longest_edge": 32})
    return tiny_model(PixtralConfig), PixtralProcessor(images, make_tokenizer(), spatial_merge_size=2)


DEEPSEEK_V4_VISION = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "downsample_ratio": 2, "max_image_tokens": 64, "min_pixels": 16, "max_wh_ratio": 8,
}  # fmt: skip
DEEPSEEK_V4_TEXT = {
    "vocab_size": 300, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "head_dim": 16, "partial_rotary_factor": 0.5, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2, "hc_sinkhorn_iters": 4, "sliding_window": 16,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64, "max_position_embeddings": 512,
}  # fmt: skip


def tiny_deepseek_v4_vl():
    names = [*BLOCK_TOKENS, IMAGE_PLACEHOLDER]
    tokenizer = make_deepseek_v4_tokenizer({name: 290 + number for number, name in enumerate(names)})
    sizes = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio")
    images = DeepseekV4ImageProcessor(**{name: DEEPSEEK_V4_VISION[name] for name in sizes})
    processor = DeepseekV4Processor(images, tokenizer)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = DeepseekV4VlConfig(
        **DEEPSEEK_V4_TEXT,
        **special,
        vision_config=DEEPSEEK_V4_VISION,
        image_start_token_id=processor.image_token_ids[0],
    )
    torch.manual_seed(0)
    model = DeepseekV4ForConditionalGeneration(config).eval()
    # A checkpoint brings the table that says which experts a token goes to; here they take turns.
    table = model.model.language_model.layers[0].mlp.gate.tid2eid
    table.copy_((torch.arange(len(table))[:, None] + torch.arange(2)) % config.n_routed_experts)
    return model, processor


TINY_MODELS = {"deepseek_v4_vl": tiny_deepseek_v4_vl, "lfm3_vl": tiny_lfm3_vl, "pixtral": tiny_pixtral}


def picture(height, width, seed=0):
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class LabelledPrompts:
    """Four rows of text with two, one, no and one picture of unequal sizes; `collate` makes a batch of them."""

    def __init__(self, processor):
        self.processor = processor
        one, two, three, four = picture(16, 8), picture(8, 24), picture(12, 12), picture(8, 8)
        image = processor.image_token
        self.rows = [
            (f"a {image}{image}", [one, two]), (f"{image} long words", [three]), ("no", []), (f"{image}!", [four]),
        ]  # fmt: skip

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"row": self.rows[index]}

    def collate(self, examples):
        text, images = zip(*(example["row"] for example in examples))
        inputs = self.processor(text=list(text), images=list(images), return_tensors="pt")
        # A row's first token has nothing before it to be told from, but padding where the batch has some.
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"].cumsum(-1) <= 1, -100)
        return inputs


def trainer_settings(folder, **settings):
    """What every run here shares: CPU, silence, one update of plain gradient descent."""
    return {
        "output_dir": str(folder), "max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0,
        "lr_scheduler_type": "constant", "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 0,
        "remove_unused_columns": False, "save_strategy": "no", "dataloader_pin_memory": False,
    } | settings  # fmt: skip
