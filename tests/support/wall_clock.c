/* Preloaded into processes of a test: a wall clock that can be set for each process, as if its machine's were.

   The file $WALL_CLOCKS/PID holds by how many seconds the wall clock of that process is off; it is looked at every 20 ms.
   Monotonic clocks stay as they are. Absolute deadlines by the wall clock are turned back into the kernel's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LOOK_EVERY_NS 20000000LL
#define FIRST_WALL_S 1000000000LL /* what is later than 2001 is a wall clock's, not a monotonic one's */

static long long offset_s, looked_at_ns;
static long (*real_syscall)(long, ...);

static int now(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, at);
}

static long long offset(void) {
    struct timespec at;
    now(CLOCK_MONOTONIC, &at);
    long long ns = at.tv_sec * 1000000000LL + at.tv_nsec;
    if (ns - __atomic_load_n(&looked_at_ns, __ATOMIC_RELAXED) < LOOK_EVERY_NS) return __atomic_load_n(&offset_s, __ATOMIC_RELAXED);
    __atomic_store_n(&looked_at_ns, ns, __ATOMIC_RELAXED);
    const char *folder = getenv("WALL_CLOCKS");
    char path[512], text[32];
    long long found = 0;
    if (folder) {
        int error = errno; /* no clock changes it, and most processes have no file */
        snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            ssize_t count = read(file, text, sizeof text - 1);
            close(file);
            text[count > 0 ? count : 0] = 0;
            found = atoll(text);
        }
        errno = error;
    }
    __atomic_store_n(&offset_s, found, __ATOMIC_RELAXED);
    return found;
}

static struct timespec real_deadline(const struct timespec *at) {
    struct timespec real = *at;
    if (real.tv_sec >= FIRST_WALL_S) real.tv_sec -= offset();
    return real;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = now(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    (void)zone;
    struct timespec real;
    int failed = clock_gettime(CLOCK_REALTIME, &real);
    if (!failed && at) *at = (struct timeval){real.tv_sec, real.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *at) {
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    if (at) *at = real.tv_sec;
    return real.tv_sec;
}

#define TIMED_WAIT(name, type, ...)                                                   \
    static int (*real)(__VA_ARGS__);                                                  \
    if (!real) real = (int (*)(__VA_ARGS__))dlvsym(RTLD_NEXT, #name, "GLIBC_2.3.2");  \
    if (!real) real = (int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);                  \
    struct timespec deadline = real_deadline(at)

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *at) {
    TIMED_WAIT(pthread_cond_timedwait, cond, pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    return real(cond, mutex, &deadline);
}

int sem_timedwait(sem_t *sem, const struct timespec *at) {
    TIMED_WAIT(sem_timedwait, sem, sem_t *, const struct timespec *);
    return real(sem, &deadline);
}

long syscall(long number, ...) { /* abseil waits with FUTEX_WAIT_BITSET until a time of the wall clock */
    va_list given;
    va_start(given, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(given, long);
    va_end(given);
    if (!real_syscall) real_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    struct timespec deadline;
    if (number == SYS_futex && a[3] && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET && (a[1] & FUTEX_CLOCK_REALTIME)) {
        deadline = real_deadline((const struct timespec *)a[3]);
        a[3] = (long)&deadline;
    }
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
