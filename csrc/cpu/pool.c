/* The worker pool: threads that sleep on a condition variable and help with one job at a time. */
#define _POSIX_C_SOURCE 200809L

#include "cpu/pool.h"

#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>

/* One call of ncs_pool_run. Lives on the caller's stack: the caller leaves only when no worker is inside. */
typedef struct {
  void (*run)(const void* task, size_t chunk);
  const void* task;
  size_t chunks;
  size_t next; /* the next chunk to take; atomic */
  int inside;  /* workers at this job; under the pool's mutex */
} ncs_job;

struct ncs_pool {
  int instruction_set;
  int workers;
  pthread_t* threads;
  pthread_mutex_t mutex; /* guards what follows */
  pthread_cond_t wake;   /* a job was posted, or the pool is ending */
  pthread_cond_t left;   /* the last worker left a job */
  ncs_job* job;          /* with chunks to take, as far as is known; NULL: none */
  int ending;
};

static void drain(ncs_job* job) {
  fenv_t callers;
  /* TensorFlow's threads flush denormals to zero, a pool's threads do not: this gives equal results on both. */
  fegetenv(&callers);
  fesetenv(FE_DFL_ENV);
  for (;;) {
    const size_t chunk = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    if (chunk >= job->chunks) break;
    job->run(job->task, chunk);
  }
  fesetenv(&callers);
}

static void* work(void* argument) {
  ncs_pool* pool = argument;
  pthread_mutex_lock(&pool->mutex);
  while (!pool->ending) {
    ncs_job* job = pool->job;
    if (job == NULL) {
      pthread_cond_wait(&pool->wake, &pool->mutex);
      continue;
    }
    ++job->inside;
    pthread_mutex_unlock(&pool->mutex);
    drain(job);
    pthread_mutex_lock(&pool->mutex);
    if (pool->job == job) pool->job = NULL; /* nothing left to take */
    if (--job->inside == 0) pthread_cond_broadcast(&pool->left);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

void ncs_pool_run(ncs_pool* pool, void (*run)(const void* task, size_t chunk), const void* task, size_t chunks,
                  int alone) {
  ncs_job job = {run, task, chunks, 0, 0};
  int posted = 0;
  if (chunks > 1 && pool->workers > 0 && !alone) {
    pthread_mutex_lock(&pool->mutex);
    if (pool->job == NULL) {
      pool->job = &job;
      posted = 1;
      for (size_t i = 1; i < chunks && i <= (size_t)pool->workers; ++i) pthread_cond_signal(&pool->wake);
    }
    pthread_mutex_unlock(&pool->mutex);
  }
  drain(&job);
  if (!posted) return;
  /* All chunks are taken: workers that still sleep need not begin, and are not waited for. */
  pthread_mutex_lock(&pool->mutex);
  if (pool->job == &job) pool->job = NULL;
  while (job.inside > 0) pthread_cond_wait(&pool->left, &pool->mutex);
  pthread_mutex_unlock(&pool->mutex);
}

static int find_best_instruction_set(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return NCS_INSTRUCTION_SET_AVX512;
  if (__builtin_cpu_supports("avx2")) return NCS_INSTRUCTION_SET_AVX2;
#endif
  return NCS_INSTRUCTION_SET_BASELINE;
}

int ncs_pool_instruction_set(const ncs_pool* pool) { return pool->instruction_set; }

/* Ends and joins the first `workers` threads, then frees the pool. */
static void release(ncs_pool* pool, int workers) {
  pthread_mutex_lock(&pool->mutex);
  pool->ending = 1;
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
  while (workers > 0) pthread_join(pool->threads[--workers], NULL);
  pthread_cond_destroy(&pool->left);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->mutex);
  free(pool->threads);
  free(pool);
}

ncclResult_t ncs_pool_create(int threads, int instruction_set, ncs_pool** out) {
  const int best = find_best_instruction_set();
  int started = 0, failed = 0;
  ncs_pool* pool;
  if (out == NULL) return ncclInvalidArgument;
  *out = NULL;
  if (instruction_set == NCS_INSTRUCTION_SET_BEST) instruction_set = best;
  if (threads < 1 || instruction_set < NCS_INSTRUCTION_SET_BASELINE || instruction_set > best)
    return ncclInvalidArgument;

  pool = calloc(1, sizeof(*pool));
  if (pool == NULL) return ncclSystemError;
  pool->instruction_set = instruction_set;
  pool->workers = threads - 1;
  pool->threads = calloc((size_t)threads, sizeof(*pool->threads));
  if (pool->threads == NULL) {
    free(pool);
    return ncclSystemError;
  }
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pthread_cond_init(&pool->left, NULL);

  while (started < pool->workers && !failed) {
    failed = ncs_start_thread(&pool->threads[started], work, pool);
    if (!failed) ++started;
  }
  if (failed) {
    release(pool, started);
    return ncclSystemError;
  }
  *out = pool;
  return ncclSuccess;
}

void ncs_pool_destroy(ncs_pool* pool) {
  if (pool != NULL) release(pool, pool->workers);
}
