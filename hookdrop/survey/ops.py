"""The names of operations in a trace, in groups: what a function of torch does to a tensor."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    "view reshape view_as reshape_as flatten unflatten permute transpose swapaxes movedim moveaxis T mT t squeeze "
    "unsqueeze contiguous"
)
"""The same numbers in another shape."""
CROPS = _names("getitem narrow index_select")
"""Some of the rows, such as the crop of padded windows."""
SPLITS = _names("split chunk unbind")
PARTS = VIEWS | CROPS | SPLITS
"""Some or all of the numbers of a tensor."""
COPIES = _names("to type type_as float half bfloat16 double detach data clone contiguous")
"""The same numbers, possibly in another dtype."""
DROPOUTS = _names(
    "dropout dropout1d dropout2d dropout3d native_dropout alpha_dropout feature_dropout feature_alpha_dropout"
)
"""Random drops, which return their input in eval mode."""
SIZE_KEEPING = VIEWS | COPIES | DROPOUTS | _names("alias mul div neg roll flip")
"""Linear in one tensor, and of its size."""
CONVS = frozenset(f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3))
ENLARGING = frozenset({"interpolate", "upsample", "pixel_shuffle", *(name for name in CONVS if "_" in name)})
"""More pixels than before."""
FUSED_ATTENTION = "scaled_dot_product_attention"
SOFTMAX = _names("softmax special_softmax")
SHOWN_ATTENTION = "multi_head_attention_forward"
"""Attention as one function, whose operations a hook can see."""
HIDDEN_ATTENTION = frozenset({SHOWN_ATTENTION, "native_multi_head_attention"})
"""Attention as one function, which applies the weight of the projection without calling the layer."""
PRODUCTS = _names("matmul mm bmm baddbmm addmm einsum linear")
"""Products of matrices."""
AFFINE = _names("linear conv1d conv2d conv3d matmul addmm add")
"""Linear in one tensor, with weights."""
CATS = _names("cat concat concatenate")
RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
