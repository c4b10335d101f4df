"""Rows that cost more than they need to, since an op of theirs has no rule."""

OPEN = frozenset(
    {
        "CTC",
        "GraphSAGE",
        "HashedCrossing",
        "LSTM stateful",
        "RandomElasticTransform",
        "bench: sparse",
        "ops.associative_scan",
        "ops.associative_scan of pairs",
        "ops.fori_loop, nested",
        "parity: losses/CASES/CTC",
        "parity: losses/CLASSES_OF_LOSSES/CTC",
        "parity: programs/MODELS/sparse_input",
        "program: captcha_ocr_by_sum",
        "program: maml",
        "program: merged_graphs",
        "ragged mean",
        "ragged to_tensor",
        "sparse input",
        "speech, CTC",
        "tf.sparse product",
        "wide and deep",
    }
)
