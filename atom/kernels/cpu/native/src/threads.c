/* The team: one thread a core that runs kernels together, and sleeps between them.
 *
 * Waiting is in three stages. A barrier inside a run spins, then yields, so that a neighbour on the same core (a second
 * engine, a server) gets its turn instead of watching this thread spin; a worker without a run spins for a moment, since
 * the next call is often near, then sleeps on a condition: an idle engine uses no CPU.
 *
 * Fork: threads do not survive it. The child starts a team of its own at its first run; a fork during a run of another
 * thread is safe for the child for the same reason.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setaffinity_np */
#endif
#include "atom.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define MAX_THREADS 1024
/* In nanoseconds, since one pause takes 5 to 60 of them. A barrier that was not reached by spinning hints that threads share
 * a core, where spinning keeps the other from coming: the next ones spin less, down to the shortest. */
#define SPIN_LONGEST 20000
#define SPIN_SHORTEST 1000
#define SPIN_IDLE 30000 /* between two runs */
#define LINE 64

struct atom_team {
    /* Each on its own cache line: pieces are drawn while others poll the generation. */
    _Alignas(LINE) atomic_int_fast64_t next;
    _Alignas(LINE) atomic_int arrived;
    _Alignas(LINE) atomic_uint generation; /* of the barrier */
    _Alignas(LINE) atomic_uint job;        /* counts the runs; a worker waits for it to change */
    atomic_int sleepers;
    atomic_bool is_closing;
    atom_body body;
    const void *arguments;
    char *shared;
    int num_threads;
    pthread_mutex_t mutex; /* of the condition */
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
    atom_worker workers[MAX_THREADS];
};

static struct {
    pthread_mutex_t mutex; /* one run at a time in a process */
    atom_team *team;
    int num_threads;
    int is_pinned;
    int cpus[MAX_THREADS];
    int has_fork_handler;
} process = {.mutex = PTHREAD_MUTEX_INITIALIZER, .num_threads = 1};

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* "yield" is a no-op on most cores */
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Spin until *word is not `old`, no longer than `limit`; whether it changed. */
static int spin(atomic_uint *word, uint32_t old, int64_t limit) {
    int64_t end = 0;
    for (int turns = 1; atomic_load_explicit(word, memory_order_acquire) == old; turns++) {
        pause_core();
        if (turns % 32 == 0) {
            int64_t now = nanoseconds();
            if (end == 0)
                end = now + limit;
            else if (now > end)
                return 0;
        }
    }
    return 1;
}

int64_t atom_next(atom_worker *worker) {
    return atomic_fetch_add_explicit(&worker->team->next, 1, memory_order_relaxed);
}

char *atom_shared(atom_worker *worker) { return worker->team->shared; }

void atom_barrier(atom_worker *worker) {
    atom_team *team = worker->team;
    if (worker->num_threads == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    uint32_t left = worker->sense; /* generations that this thread has passed */
    worker->sense = left + 1;
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == worker->num_threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, left + 1, memory_order_release);
        return;
    }
    if (spin(&team->generation, left, worker->patience)) {
        worker->patience = worker->patience < SPIN_LONGEST ? worker->patience + SPIN_SHORTEST / 4 : SPIN_LONGEST;
        return;
    }
    worker->patience = worker->patience / 2 > SPIN_SHORTEST ? worker->patience / 2 : SPIN_SHORTEST;
    while (atomic_load_explicit(&team->generation, memory_order_acquire) == left)
        sched_yield();
}

static char *new_memory(size_t size) {
    void *memory = NULL;
    if (posix_memalign(&memory, 1 << 21, size) != 0)
        abort(); /* a few MB are not there: nothing else in the process would work either */
#ifdef MADV_HUGEPAGE
    madvise(memory, size, MADV_HUGEPAGE);
#endif
    return memory;
}

static void *work(void *argument) {
    atom_worker *worker = argument;
    atom_team *team = worker->team;
    worker->scratch = new_memory(ATOM_SCRATCH); /* here, so that its pages are near this thread */
    for (uint32_t seen = 0;;) {
        if (!spin(&team->job, seen, SPIN_IDLE)) {
            pthread_mutex_lock(&team->mutex);
            atomic_fetch_add(&team->sleepers, 1); /* before the job is looked at again: see atom_run */
            while (atomic_load(&team->job) == seen)
                pthread_cond_wait(&team->wake, &team->mutex);
            atomic_fetch_sub(&team->sleepers, 1);
            pthread_mutex_unlock(&team->mutex);
        }
        seen++;
        if (atomic_load_explicit(&team->is_closing, memory_order_relaxed))
            break;
        team->body(worker, team->arguments);
        atom_barrier(worker);
    }
    free(worker->scratch);
    return NULL;
}

static void announce(atom_team *team) {
    atomic_fetch_add(&team->job, 1);
    if (atomic_load(&team->sleepers) > 0) {
        pthread_mutex_lock(&team->mutex);
        pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->mutex);
    }
}

static void after_fork(void) {
    process.team = NULL; /* its threads are not here; its memory is left alone */
    pthread_mutex_init(&process.mutex, NULL);
}

static void pin(pthread_t thread, int cpu) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set); /* a CPU that we may not use: not pinned */
#else
    (void)thread, (void)cpu;
#endif
}

/* The team with as many threads as could be started. */
static atom_team *start(void) {
    if (!process.has_fork_handler) {
        pthread_atfork(NULL, NULL, after_fork);
        process.has_fork_handler = 1;
    }
    void *memory = NULL;
    if (posix_memalign(&memory, LINE, sizeof(atom_team)) != 0)
        abort();
    atom_team *team = memset(memory, 0, sizeof(atom_team));
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->wake, NULL);
    team->num_threads = 1;
    team->workers[0] = (atom_worker){.team = team, .id = 0, .patience = SPIN_LONGEST, .scratch = new_memory(ATOM_SCRATCH)};
    team->shared = new_memory(ATOM_SHARED);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads that Python knows */
    for (int i = 1; i < process.num_threads; i++) {
        team->workers[i] = (atom_worker){.team = team, .id = i, .patience = SPIN_LONGEST};
        if (pthread_create(&team->threads[i], NULL, work, &team->workers[i]) != 0)
            break;
        if (process.is_pinned)
            pin(team->threads[i], process.cpus[i]);
        team->num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (int i = 0; i < team->num_threads; i++) /* before the first run: a worker reads it only then */
        team->workers[i].num_threads = team->num_threads;
    process.num_threads = team->num_threads;
    return process.team = team;
}

static void stop(void) {
    atom_team *team = process.team;
    if (team == NULL)
        return;
    atomic_store(&team->is_closing, 1);
    announce(team);
    for (int i = 1; i < team->num_threads; i++)
        pthread_join(team->threads[i], NULL);
    free(team->workers[0].scratch);
    free(team->shared);
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->mutex);
    free(team);
    process.team = NULL;
}

void atom_run(atom_body body, const void *arguments) {
    pthread_mutex_lock(&process.mutex);
    atom_team *team = process.team ? process.team : start();
    if (team->num_threads > 1) {
        team->body = body;
        team->arguments = arguments;
        announce(team);
    }
    body(&team->workers[0], arguments);
    atom_barrier(&team->workers[0]);
    pthread_mutex_unlock(&process.mutex);
}

void atom_run_alone(atom_body body, const void *arguments) {
    pthread_mutex_lock(&process.mutex);
    atom_team *team = process.team ? process.team : start();
    atom_worker worker = team->workers[0];
    worker.num_threads = 1;
    body(&worker, arguments);
    atom_barrier(&worker);
    pthread_mutex_unlock(&process.mutex);
}

void atom_set_threads(int num_threads, const int *cpus) {
    num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    pthread_mutex_lock(&process.mutex);
    stop();
    process.num_threads = num_threads;
    process.is_pinned = cpus != NULL;
    if (cpus)
        memcpy(process.cpus, cpus, sizeof(int) * num_threads);
    pthread_mutex_unlock(&process.mutex);
}

int atom_num_threads(void) { return process.num_threads; }
