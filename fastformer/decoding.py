"""From a trained model to a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.checks import require_size, require_token_ids
from fastformer.modules import Embeddings, PositionalEncoding
from fastformer.transformer import EncoderDecoder, subsequent_mask

__all__ = ["greedy_decode"]


@torch.no_grad()
def greedy_decode(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor | None, max_len: int, start_symbol: int
) -> Tensor:
    """Decode the likeliest next token at each step.

        y_0 = start_symbol, y_t = argmax_v p(v | y_0 .. y_{t-1}, src)

    Every row of the batch is decoded to max_len; nothing stops at an end symbol. Gradients are off.
    The mode of the model does not change: call model.eval() first, or dropout applies.

    Args:
        model: what `make_model` gives: encode, decode and generator.
        src: [B, S] token ids.
        src_mask: what the encoder takes, [B, 1, S] as `Batch` makes it; None masks nothing out.
        max_len: length of the result, the start symbol included, at least 1.
        start_symbol: the first id of every row.

    Returns:
        [B, max_len], in the dtype and on the device of src.

    Raises:
        ValueError: src not [B, S], a max_len less than 1 or beyond the model's positions, a
            start_symbol that is not in its vocabulary; as the model does for ids and masks.
        TypeError: ids that are not integers, a model without encode, decode and generator.

    Source: harvardnlp/annotated-transformer, "Greedy Decoding".
    """
    require_token_ids("src", src)
    require_size(max_len=max_len)
    require_size(0, start_symbol=start_symbol)
    _require_decoder(model, max_len, start_symbol)
    memory = model.encode(src, src_mask)
    ys = torch.full((src.shape[0], max_len), start_symbol, dtype=src.dtype, device=src.device)
    mask = subsequent_mask(max_len).to(src.device)
    for length in range(1, max_len):
        output = model.decode(memory, src_mask, ys[:, :length], mask[:, :length, :length])
        ys[:, length] = model.generator(output[:, -1]).argmax(-1)
    return ys


def _require_decoder(model: EncoderDecoder, max_len: int, start_symbol: int) -> None:
    """Require a model that decodes, and whose positions and vocabulary fit the last step too."""
    for part in ("encode", "decode", "generator"):
        if not callable(getattr(model, part, None)):
            kind = type(model).__name__
            raise TypeError(f"model is a {kind} without {part}; expected what make_model gives")
    embed = getattr(model, "tgt_embed", None)
    for module in embed.modules() if isinstance(embed, nn.Module) else ():
        if isinstance(module, PositionalEncoding) and max_len - 1 > module.pe.shape[1]:
            raise ValueError(
                f"max_len is {max_len}; expected at most {module.pe.shape[1] + 1}, "
                "the positions of the model and the symbol after them"
            )
        if isinstance(module, Embeddings) and start_symbol >= module.lut.num_embeddings:
            raise ValueError(
                f"start_symbol is {start_symbol}; "
                f"expected a token of the {module.lut.num_embeddings}"
            )
