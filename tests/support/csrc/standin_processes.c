/* Ranks in several processes: by files in the folder named by STANDIN_FOLDER, which tell that a rank has come, and
 * what it brings. A file appears whole, and there is never another one of its name. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "standin_nccl.h"

enum { MAX_PATH = 512 };

static const char* folder(void) { return getenv("STANDIN_FOLDER"); }

static void name_file(char path[MAX_PATH], const clique* of, const char* what, long number, int rank) {
  snprintf(path, MAX_PATH, "%.250s/%.100s-%s-%ld-%d", folder(), of->id.internal, what, number, rank);
}

static FILE* begin_file(char unfinished[MAX_PATH], const char* path) {
  snprintf(unfinished, MAX_PATH, "%.450s.%ld", path, (long)getpid());
  return fopen(unfinished, "wb");
}

void standin_announce(const clique* of, const char* what, int rank) {
  char path[MAX_PATH], unfinished[MAX_PATH];
  FILE* file;
  if (folder() == NULL) return;
  name_file(path, of, what, 0, rank);
  file = begin_file(unfinished, path);
  if (file == NULL) return;
  fclose(file);
  rename(unfinished, path);
}

int standin_announced(const clique* of, const char* what, int n_here) {
  char path[MAX_PATH];
  int n = 0;
  if (folder() == NULL) return n_here;
  for (int r = 0; r < of->n; ++r) {
    name_file(path, of, what, 0, r);
    n += access(path, F_OK) == 0;
  }
  return n;
}

/* How many bytes follow a request, or one of its messages. */
static size_t payload(const request* asked, int n) {
  if (asked->kind == MESSAGES) return 0;
  return asked->count * ncs_size_of(asked->dtype) * (asked->kind == REDUCE_SCATTER ? (size_t)n : 1);
}

static size_t message_payload(const message* one) {
  return one->is_send ? one->count * ncs_size_of(one->dtype) : 0;
}

void standin_send_request(const meeting* at, int rank) {
  const request* asked = &at->requests[rank];
  char path[MAX_PATH], unfinished[MAX_PATH];
  FILE* file;
  if (folder() == NULL) return;
  name_file(path, at->clique, "meeting", at->number, rank);
  file = begin_file(unfinished, path);
  if (file == NULL) return;
  fwrite(asked, sizeof(*asked), 1, file);
  fwrite(asked->send, 1, payload(asked, at->clique->n), file);
  for (int i = 0; i < asked->n_messages; ++i)
    fwrite(asked->messages[i].buffer, 1, message_payload(&asked->messages[i]), file);
  fclose(file);
  rename(unfinished, path);
}

static void* read_payload(size_t size, FILE* file) {
  void* bytes = malloc(size + 1);
  if (fread(bytes, 1, size, file) != size) abort();
  return bytes;
}

int standin_receive_request(meeting* at, int rank) {
  request* asked = &at->requests[rank];
  char path[MAX_PATH];
  FILE* file;
  if (folder() == NULL) return 0;
  name_file(path, at->clique, "meeting", at->number, rank);
  file = fopen(path, "rb");
  if (file == NULL) return 0;
  if (fread(asked, sizeof(*asked), 1, file) != 1) abort();
  asked->comm = NULL; /* pointers of the other process mean nothing here */
  asked->stream = NULL;
  asked->recv = NULL;
  asked->send = read_payload(payload(asked, at->clique->n), file);
  for (int i = 0; i < asked->n_messages; ++i)
    asked->messages[i].buffer = read_payload(message_payload(&asked->messages[i]), file);
  fclose(file);
  return 1;
}

void standin_forget_requests(meeting* at) {
  for (int r = 0; r < at->clique->n; ++r) {
    request* asked = &at->requests[r];
    if (at->clique->members[r] != NULL) continue;
    free((void*)(uintptr_t)asked->send);
    for (int i = 0; i < asked->n_messages; ++i) free(asked->messages[i].buffer);
  }
}
