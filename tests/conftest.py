"""What every test needs before TensorFlow is first imported."""

import os

# Only errors: TensorFlow says on import that it found no GPU. Subprocesses inherit it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
