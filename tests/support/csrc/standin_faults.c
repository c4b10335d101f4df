/* The stand-in's instructions, its log and its counts; see standin.h. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

enum { MAX_FAULTS = 8, KINDS = 10 };

typedef struct {
  char name[48];
  int rank, nth, value, seen;
  double told_s;
} fault;

static fault faults[MAX_FAULTS];
static int n_faults;
static const char* log_path;
static const char* const kinds[KINDS] = {"stream", "event",     "memory",  "comm",           "thread",        "wait",
                                          "to_device", "to_host", "bytes_to_device", "bytes_to_host"};
static long long counts[KINDS];

static void parse(const char* text) {
  char copy[256];
  char* rest = NULL;
  snprintf(copy, sizeof(copy), "%s", text);
  n_faults = 0;
  for (char* one = strtok_r(copy, ",", &rest); one != NULL && n_faults < MAX_FAULTS; one = strtok_r(NULL, ",", &rest)) {
    fault* new = &faults[n_faults++];
    char* equals = strchr(one, '=');
    char* first = strchr(one, ':');
    char* second = first != NULL ? strchr(first + 1, ':') : NULL;
    *new = (fault){.rank = -1, .nth = 1, .value = -1, .told_s = standin_now_s()};
    if (equals != NULL) new->value = atoi(equals + 1);
    if (strncmp(one, "nccl", 4) == 0 || strncmp(one, "cu", 2) == 0) {
      if (first != NULL) new->nth = atoi(first + 1);
    } else {
      if (first != NULL) new->rank = atoi(first + 1);
      if (second != NULL) new->nth = atoi(second + 1);
    }
    snprintf(new->name, sizeof(new->name), "%.*s", (int)strcspn(one, ":="), one);
  }
}

void standin_fail(const char* instructions) {
  standin_lock();
  parse(instructions);
  standin_unlock();
}

int standin_seen(int index) {
  int seen;
  standin_lock();
  seen = faults[index].seen;
  standin_unlock();
  return seen;
}

int standin_is_told(const char* name, int rank, int* value) {
  for (int i = 0; i < n_faults; ++i) {
    fault* one = &faults[i];
    if (strcmp(one->name, name) != 0 || one->rank != rank) continue;
    if (++one->seen != one->nth && one->nth != 0) continue;
    if (value != NULL && one->value >= 0) *value = one->value;
    return 1;
  }
  return 0;
}

int standin_is_working(int device) {
  for (int i = 0; i < n_faults; ++i)
    if (strcmp(faults[i].name, "working") == 0 && faults[i].rank == device &&
        (faults[i].value < 0 || standin_now_s() < faults[i].told_s + 1e-3 * faults[i].value))
      return 1;
  return 0;
}

void standin_outwait(int device) {
  for (int is_working = 1; is_working;) {
    standin_lock();
    is_working = standin_is_working(device);
    standin_unlock();
    if (is_working) standin_nap(1e-3);
  }
}

int standin_is_corrupt(int from, int to) {
  for (int i = 0; i < n_faults; ++i)
    if (strcmp(faults[i].name, "corrupt") == 0 && faults[i].rank == from && faults[i].nth == to) return 1;
  return 0;
}

void standin_log(const char* call, const char* value) {
  FILE* file = log_path != NULL ? fopen(log_path, "a") : NULL;
  if (file == NULL) return;
  fprintf(file, "%s %s\n", call, value);
  fclose(file);
}

void standin_count(const char* kind, long long change) {
  for (int i = 0; i < KINDS; ++i)
    if (strcmp(kind, kinds[i]) == 0) counts[i] += change;
}

long long standin_total(const char* kind) {
  long long count = -1;
  standin_lock();
  for (int i = 0; i < KINDS; ++i)
    if (strcmp(kind, kinds[i]) == 0) count = counts[i];
  standin_unlock();
  return count;
}

int standin_alive(const char* kind) { return (int)standin_total(kind); }

__attribute__((constructor)) static void begin(void) {
  const char* told = getenv("STANDIN_FAIL");
  log_path = getenv("STANDIN_LOG");
  if (told != NULL) parse(told);
}
