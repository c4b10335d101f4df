"""Rows that cost more than they need to, since an op of theirs has no rule."""

OPEN = frozenset(
    {
        "GraphSAGE",
        "HashedCrossing",
        "LSTM stateful",
        "RandomElasticTransform",
        "bench: sparse",
        "parity: programs/MODELS/sparse_input",
        "program: maml",
        "program: merged_graphs",
        "ragged mean",
        "ragged to_tensor",
        "sparse input",
        "tf.sparse product",
        "wide and deep",
    }
)
