"""Time the first step of ResNet-50 on so many GPUs, and of a second such model, whose memory the process has by now."""

import gc
import sys
import time

import keras

from ncclsync import nccl_parallel
from ncclsync.tools.bench.models import MODELS
from ncclsync.tools.bench.training import BATCH_SIZES

TOWERS, MODEL = int(sys.argv[1]), MODELS["resnet50"]
ROWS = BATCH_SIZES["resnet50"]


def main():
    x, y = MODEL.data(ROWS)
    for number in ("first", "second"):
        began = time.perf_counter()
        model = nccl_parallel(towers=TOWERS)(MODEL.build)()
        tell = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, number=number, began=began: print(
                f"{TOWERS} towers, {number} model: {time.perf_counter() - began:.1f} s", flush=True
            )
        )
        model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=[tell])
        model.towers.close()
        del model
        gc.collect()


main()
