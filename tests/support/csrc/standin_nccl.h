/* The stand-in libnccl's own parts: standin_nccl.c has the calls, standin_meeting.c what they do to the data. */
#ifndef STANDIN_NCCL_H_
#define STANDIN_NCCL_H_

#include <stdint.h>

#include "ncclsync.h"
#include "standin.h"

enum { MAX_RANKS = 16, MAX_QUEUE = 1024, MAX_MESSAGES = 2 * MAX_RANKS, MAX_SCALED = 4, FIRST_SCALED = 16 };
enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, MESSAGES };

typedef struct ncclComm* ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;

/* One send or receive; those of one rank in one group are one meeting of all ranks. */
typedef struct {
  int is_send, peer, dtype;
  void* buffer;
  size_t count;
} message;

/* What one rank asks for. */
typedef struct {
  ncclComm_t comm;
  cudaStream_t stream;
  int kind, dtype, op, root;
  const void* send;
  void* recv;
  size_t count;
  message messages[MAX_MESSAGES];
  int n_messages;
} request;

/* One collective of all ranks: it happens when the last one's stream has reached it. */
typedef struct meeting {
  struct clique* clique;
  long number;
  request requests[MAX_RANKS];
  int is_asked[MAX_RANKS], has_arrived[MAX_RANKS];
  double not_before[MAX_RANKS];
  double ends_s; /* 0: not all ranks have arrived */
  int is_running, is_computed, status, is_done, is_broken;
  int n_left;    /* so many ranks' streams have gone on */
  struct meeting* next;
} meeting;

typedef struct {
  meeting* at;
  int rank;
} attendance;

/* All ranks that were created by one unique id. */
typedef struct clique {
  ncclUniqueId id;
  int n, n_joined, n_finalized;
  int split_colors[MAX_RANKS], split_keys[MAX_RANKS], n_split;
  ncclComm_t split_comms[MAX_RANKS];
  ncclComm_t members[MAX_RANKS];
  meeting* meetings;
  struct clique* next;
} clique;

struct ncclComm {
  int rank, device, blocking;
  clique* clique;
  int state;     /* what ncclCommGetAsyncError tells */
  int is_stuck;  /* its creation, or its launch, never ends */
  int is_asked;  /* whether the state was asked for since the last call: NCCL never ends one at once */
  int is_alive, is_aborted, is_finalized;
  int busy;      /* a call is under way */
  int* owner;    /* the thread whose open group it is in */
  int max_ctas;        /* 0: as many channels as there are */
  unsigned connected;  /* bits of the algorithms that have run */
  long long taken;     /* bytes of its device */
  long n_launched;
  request unlaunched[MAX_QUEUE];
  int n_unlaunched;
  struct { double scalar; int dtype; } scaled[MAX_SCALED];
};

/* Ranks in other processes; all this is nothing without STANDIN_FOLDER. */
void standin_announce(const clique* of, const char* what, int rank);
int standin_announced(const clique* of, const char* what, int n_here); /* by how many ranks in all */
void standin_send_request(const meeting* at, int rank);
int standin_receive_request(meeting* at, int rank); /* whether it has come */
void standin_forget_requests(meeting* at);

/* Not ncclGetVersion, which may be TensorFlow's where both are loaded. */
int standin_version(void);

/* Takes the lock, logs, and does what it was told. Every call begins so and ends by `standin_leave`. */
int standin_enter(const char* name, const char* format, int value);
int standin_leave(int status);
int standin_refuse(int status, const char* why);
/* Around each call, outside the lock: whether another thread is in one of this communicator. */
int standin_occupy(ncclComm_t comm);
void standin_release(ncclComm_t comm);
int standin_check(ncclComm_t comm, int was_busy, int must_be_ready);
/* From now on the communicator is in progress, until it has been asked. */
void standin_wait_again(ncclComm_t comm);
/* A thread that ends at once: NCCL starts one for each group of non-blocking communicators. */
void standin_start_thread(void);

void standin_say(const char* format, ...) __attribute__((format(printf, 1, 2)));
/* Adds a request to its meeting and queues it on its stream. ncclInvalidUsage: it does not go with the others'. */
int standin_meet(const request* asked);
/* Waits until no collective is in the middle of its memory. */
void standin_let_end(const clique* of);
int standin_fit(const request* one, const request* other);
int standin_is_in_order(const request* asked);

#endif
