/* The kernel that records a timestamp, which cpu/meter.c keeps. */
#include <stdlib.h>

#include "tf/api.h"

typedef struct {
  ncs_meter* meter;
  int64_t span, ends, tokens, values;
} timestamp_kernel;

static void read_timestamp(TF_OpKernelConstruction* context, timestamp_kernel* kernel, TF_Status* status) {
  kernel->meter = (ncs_meter*)(intptr_t)ncs_tf_read_attr(context, "meter", status);
  kernel->span = ncs_tf_read_attr(context, "span", status);
  kernel->ends = ncs_tf_read_attr(context, "ends", status);
  kernel->tokens = ncs_tf_read_attr(context, "n_tokens", status);
  kernel->values = ncs_tf_read_attr(context, "n_values", status);
}

static void compute_timestamp(const timestamp_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  int64_t value = 0;
  ncs_tf_view seen;
  if (kernel->values > 0 && ncs_tf_read_input(context, (int)kernel->tokens, &seen, status))
    value = *(const int64_t*)seen.data;
  if (ncs_tf_is_ok(status) &&
      ncs_meter_record(kernel->meter, (int)kernel->span, (int)kernel->ends, value) != ncclSuccess)
    ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
}

NCS_TF_KERNEL(timestamp_kernel, timestamp)

const ncs_tf_op ncs_tf_timestamp = {
    "NcclsyncTimestamp",
    {"meter: int", "span: int", "ends: int", "n_tokens: int >= 0", "n_values: int >= 0", NULL},
    {"tokens: n_tokens * float", "values: n_values * int64", NULL},
    NULL,
    create_timestamp, run_timestamp, free, 1, NULL};
