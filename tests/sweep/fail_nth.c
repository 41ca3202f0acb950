/* A library to preload: it counts the calls of one kind in one role of a run's processes, and fails the n-th.

   The test that uses it compiles it. What it does stands in the environment:

       SWEEP_COUNTS    a file of struct Counts, which all processes of the run share
       SWEEP_MADE      a file that gets the name of each folder that a process makes for gpuwatch
       SWEEP_OURS      beginnings of paths, with `:` between them: the files that are gpuwatch's own
       SWEEP_ROLE      recorder, agent, collector or launcher
       SWEEP_PART      start: before a helper reads its settings; work: from there on
       SWEEP_KIND      one of KINDS
       SWEEP_NTH       which call fails, counted over all processes of the role; 0: none, they are only counted
       SWEEP_LASTING   1: that one and all later ones
       SWEEP_ERRNO     the number that it fails with

   In agent and collector every call counts. In a rank and in the launch, whose processes the script and torchrun own,
   only those on gpuwatch's own files do, and what the launch tells its helpers. glibc only. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum Kind { WRITE, OPEN, MAP, SYNC, SEND, ALLOC, THREAD, NUM_KINDS };
static const char *const KINDS[] = {"write", "open", "map", "sync", "send", "alloc", "thread"};
enum Role { NONE, RECORDER, AGENT, COLLECTOR, LAUNCHER, NUM_ROLES };
static const char *const ROLES[] = {"", "recorder", "agent", "collector", "launcher"};
enum Part { START, WORK, NUM_PARTS };

struct Counts {
    _Atomic unsigned long calls[NUM_ROLES][NUM_PARTS][NUM_KINDS];
    _Atomic unsigned long failed;
    char first[256]; /* what the first call that failed was about */
};

static struct Counts *counts;
static enum Role role;
static enum Part part;
static pid_t own;
static int hits, nth_errno, lasting, made = -1;
static enum Part hit_part;
static enum Kind hit_kind;
static unsigned long nth;
static char ours[1024];

/* The next function of that name. */
#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(next))dlsym(RTLD_NEXT, #name)

static enum Role role_of_this_process(void) {
    static char words[4096];
    int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    long size = fd < 0 ? 0 : syscall(SYS_read, fd, words, sizeof words - 1);
    if (fd >= 0) syscall(SYS_close, fd);
    for (long at = 0; at < size; at += (long)strlen(words + at) + 1) {
        const char *word = words + at;
        if (!strcmp(word, "gpuwatch.launcher.agent.agent")) return AGENT;
        if (!strcmp(word, "gpuwatch.collector")) return COLLECTOR;
        if (!strcmp(word, "-mgpuwatch.worker")) return RECORDER;
        if (!strcmp(word, "gpuwatch.cli.main")) return LAUNCHER;
    }
    return NONE;
}

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

/* Read the environment. A process that was forked by another one of these calls it for itself. */
__attribute__((visibility("default"))) void sweep_begin(int as) {
    const char *path = setting("SWEEP_COUNTS");
    counts = NULL;
    role = as ? (enum Role)as : role_of_this_process();
    if (!*path || role == NONE) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *shared = (void *)syscall(SYS_mmap, NULL, sizeof(struct Counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (shared == MAP_FAILED) return;
    made = (int)syscall(SYS_openat, AT_FDCWD, setting("SWEEP_MADE"), O_WRONLY | O_APPEND | O_CLOEXEC);
    if (made >= 0) { /* out of the way of scripts that number their descriptors */
        int high = (int)syscall(SYS_fcntl, made, F_DUPFD_CLOEXEC, 900);
        if (high >= 0) { syscall(SYS_close, made); made = high; }
    }
    snprintf(ours, sizeof ours, "%s", setting("SWEEP_OURS"));
    nth = strtoul(setting("SWEEP_NTH"), NULL, 10);
    lasting = *setting("SWEEP_LASTING") == '1';
    nth_errno = atoi(setting("SWEEP_ERRNO"));
    hit_part = strcmp(setting("SWEEP_PART"), "start") ? WORK : START;
    for (int kind = 0; kind < NUM_KINDS; kind++)
        if (!strcmp(setting("SWEEP_KIND"), KINDS[kind])) hit_kind = (enum Kind)kind;
    hits = nth && !strcmp(setting("SWEEP_ROLE"), ROLES[role]);
    part = role == AGENT || role == COLLECTOR ? START : WORK;
    own = getpid();
    counts = shared;
}

__attribute__((constructor)) static void begin(void) { sweep_begin(NONE); }

/* Whether this call is to fail. `about` is shown to whoever looks for the reason. */
static int fails(enum Kind kind, const char *call, const char *about) {
    if (!counts || getpid() != own) return 0; /* a child that was forked and has no program of its own yet */
    unsigned long number = 1 + atomic_fetch_add(&counts->calls[role][part][kind], 1);
    if (!hits || kind != hit_kind || part != hit_part) return 0;
    if (lasting ? number < nth : number != nth) return 0;
    if (!atomic_fetch_add(&counts->failed, 1)) snprintf(counts->first, sizeof counts->first, "%s %s", call, about);
    errno = nth_errno;
    return 1;
}

static int is_ours(const char *path) {
    for (const char *at = ours; *at;) {
        const char *end = strchrnul(at, ':');
        if (end > at && !strncmp(path, at, (size_t)(end - at))) return 1;
        at = *end ? end + 1 : end;
    }
    return 0;
}

/* A launch opens the helper's log, then three pipes. torchrun has pipes of its own. */
static _Thread_local int pipes_of_a_helper;

static int counts_all(void) { return role == AGENT || role == COLLECTOR; }

static const char *path_of(int fd, char *path, size_t size) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlink, link, path, size - 1);
    path[length > 0 ? length : 0] = 0;
    return path;
}

static int fails_on_path(enum Kind kind, const char *call, const char *path) {
    if (!counts || !(counts_all() || is_ours(path))) return 0;
    return fails(kind, call, path);
}

static int fails_on_fd(enum Kind kind, const char *call, int fd, const void *data, size_t size) {
    char path[200];
    static const char line[] = "{\"type\":\"";
    if (!counts) return 0;
    path_of(fd, path, sizeof path);
    if (strstr(path, "[eventfd]")) return 0; /* a thread wakes another one: no disk and no peer is in it */
    int told = role == LAUNCHER && data && size > sizeof line && !memcmp(data, line, sizeof line - 1);
    if (!(counts_all() || told || is_ours(path))) return 0;
    return fails(kind == WRITE && !strncmp(path, "pipe:", 5) ? SEND : kind, call, path);
}

/* -- write: to a disk; what goes into a pipe is sent ------------------------------------------------------------------- */

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    return fails_on_fd(WRITE, "write", fd, data, size) ? -1 : next(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    NEXT(pwrite);
    return fails_on_fd(WRITE, "pwrite", fd, NULL, 0) ? -1 : next(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    NEXT(pwrite64);
    return fails_on_fd(WRITE, "pwrite", fd, NULL, 0) ? -1 : next(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    NEXT(writev);
    return fails_on_fd(WRITE, "writev", fd, NULL, 0) ? -1 : next(fd, parts, count);
}

int ftruncate64(int fd, off64_t size) {
    NEXT(ftruncate64);
    return fails_on_fd(WRITE, "ftruncate", fd, NULL, 0) ? -1 : next(fd, size);
}

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    NEXT(posix_fallocate64);
    return fails_on_fd(WRITE, "posix_fallocate", fd, NULL, 0) ? nth_errno : next(fd, at, size);
}

/* -- open, and whatever else takes a descriptor --------------------------------------------------------------------- */

#define MODE(flags, mode) \
    mode_t mode = 0; \
    if (__OPEN_NEEDS_MODE(flags)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

/* Libraries that are imported open /dev/null, too; a launch opens it to append, for a helper without a log. */
static int is_a_librarys(const char *path, int flags) {
    return !counts_all() && !(flags & O_APPEND) && !strcmp(path, "/dev/null");
}

int open(const char *path, int flags, ...) {
    MODE(flags, mode)
    NEXT(open);
    if (!is_a_librarys(path, flags) && fails_on_path(OPEN, "open", path)) return -1;
    return next(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags, mode)
    NEXT(open64);
    if (!is_a_librarys(path, flags) && fails_on_path(OPEN, "open", path)) return -1;
    if (role == LAUNCHER && flags & O_APPEND && !strcmp(path, "/dev/null")) pipes_of_a_helper = 3;
    return next(path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags, mode)
    NEXT(openat64);
    return fails_on_path(OPEN, "openat", path) ? -1 : next(folder, path, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir);
    if (fails_on_path(OPEN, "mkdir", path)) return -1;
    int answer = next(path, mode);
    if (!answer && made >= 0 && strstr(path, "/gpuwatch-")) {
        char line[600];
        int size = snprintf(line, sizeof line, "%s\n", path);
        syscall(SYS_write, made, line, size);
    }
    return answer;
}

int pipe2(int fds[2], int flags) {
    NEXT(pipe2);
    int of_ours = counts_all() || (role == LAUNCHER && pipes_of_a_helper-- > 0);
    if (!counts || !of_ours || !fails(OPEN, "pipe", "")) return next(fds, flags);
    pipes_of_a_helper = 0; /* it opens no more of them */
    return -1;
}

int socket(int domain, int type, int protocol) {
    NEXT(socket);
    return counts && counts_all() && fails(OPEN, "socket", "") ? -1 : next(domain, type, protocol);
}

/* -- map, sync, send, thread ---------------------------------------------------------------------------------------- */

void *mmap64(void *at, size_t size, int access, int flags, int fd, off64_t offset) {
    NEXT(mmap64);
    int bad = fd < 0 ? counts && counts_all() && fails(MAP, "mmap", "memory") : fails_on_fd(MAP, "mmap", fd, NULL, 0);
    return bad ? MAP_FAILED : next(at, size, access, flags, fd, offset);
}

void *mmap(void *at, size_t size, int access, int flags, int fd, off_t offset) {
    return mmap64(at, size, access, flags, fd, offset);
}

int fsync(int fd) {
    NEXT(fsync);
    return fails_on_fd(SYNC, "fsync", fd, NULL, 0) ? -1 : next(fd);
}

int fdatasync(int fd) {
    NEXT(fdatasync);
    return fails_on_fd(SYNC, "fdatasync", fd, NULL, 0) ? -1 : next(fd);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    NEXT(send);
    return counts && counts_all() && fails(SEND, "send", "") ? -1 : next(fd, data, size, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    NEXT(sendmsg);
    return counts && counts_all() && fails(SEND, "sendmsg", "") ? -1 : next(fd, message, flags);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
    NEXT(pthread_create);
    return counts && counts_all() && fails(THREAD, "pthread_create", "") ? nth_errno : next(thread, how, run, with);
}

/* -- memory: in agent and collector alone --------------------------------------------------------------------------- */

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);

static int no_memory(void) { return counts && counts_all() && fails(ALLOC, "alloc", ""); }

void *malloc(size_t size) { return no_memory() ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return no_memory() ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return no_memory() ? NULL : __libc_realloc(old, size); }

/* -- where a helper's work begins: with its settings ------------------------------------------------------------------ */

ssize_t read(int fd, void *data, size_t size) {
    NEXT(read);
    if (counts && !fd && part == START && getpid() == own) part = WORK;
    return next(fd, data, size);
}
