/* What the two files here share, besides the stand-in libcudart. */
#ifndef VIRTUAL_GPUS_DEVICE_H_
#define VIRTUAL_GPUS_DEVICE_H_

#include "standin.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From memory to memory, in the order of a stream; the addresses tell the direction. */
void virtual_copy(void* to, const void* from, size_t size, cudaStream_t stream);
int virtual_gpu_count(void); /* how many: VIRTUAL_GPUS, or 4; of these, what CUDA_VISIBLE_DEVICES leaves */

#ifdef __cplusplus
}
#endif
#endif
