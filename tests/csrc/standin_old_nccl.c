/* standin_nccl.c that is of version 2.4.8. */
#define ncclGetVersion newer_version
#include "standin_nccl.c"
#undef ncclGetVersion

int ncclGetVersion(int* version) {
  *version = 2408;
  return 0;
}
