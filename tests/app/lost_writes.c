/* Writes down what a process does to the files below $LOST_WRITES_ROOT, for tests/app/lost_writes.py to play again.
 *
 * Preloaded, it stands before the C library's calls. A record in $LOST_WRITES_LOG is a header of four numbers (kind,
 * inode, offset, length of the data) and the length of a path, then path and data. One lock keeps the order. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, FOLDER };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int below(const char *path) {
    const char *root = getenv("LOST_WRITES_ROOT");
    return root && strncmp(path, root, strlen(root)) == 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int path_at(int folder, const char *name, char *path) {
    if (name[0] == '/' || folder == AT_FDCWD) {
        if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
        else {
            char here[PATH_MAX];
            if (!getcwd(here, sizeof here)) return 0;
            if (snprintf(path, PATH_MAX, "%s/%s", here, name) >= PATH_MAX) return 0;
        }
        return below(path);
    }
    char base[PATH_MAX];
    if (!path_of(folder, base)) return 0;
    return snprintf(path, PATH_MAX, "%s/%s", base, name) < PATH_MAX;
}

static void record(int64_t kind, int64_t inode, int64_t offset, const char *path, const void *data, int64_t length) {
    static int log_fd = -1;
    if (log_fd < 0) log_fd = (int)syscall(SYS_openat, AT_FDCWD, getenv("LOST_WRITES_LOG"),
                                          O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int64_t header[5] = {kind, inode, offset, length, (int64_t)strlen(path)};
    struct iovec parts[3] = {{header, sizeof header}, {(void *)path, strlen(path)}, {(void *)data, (size_t)length}};
    syscall(SYS_writev, log_fd, parts, length ? 3 : 2);
}

static int64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? -1 : (int64_t)found.st_ino;
}



static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int ours = (flags & (O_CREAT | O_TRUNC)) && path_at(folder, name, path);
    if (!ours) return (int)syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    int was_there = syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    int error = errno;
    if (fd >= 0) {
        if (!was_there) record(CREATE, inode_of(fd), 0, path, "", 0);
        else if (flags & O_TRUNC) record(TRUNCATE, inode_of(fd), 0, path, "", 0);
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags | O_LARGEFILE, mode); }

static void wrote(int fd, const char *path, const void *data, ssize_t length, int64_t offset) {
    if (length > 0) record(WRITE, inode_of(fd), offset, path, data, length);
}

ssize_t write(int fd, const void *data, size_t length) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return syscall(SYS_write, fd, data, length);
    pthread_mutex_lock(&lock);
    struct stat found;
    int64_t at = fcntl(fd, F_GETFL) & O_APPEND && !fstat(fd, &found) ? found.st_size : lseek(fd, 0, SEEK_CUR);
    ssize_t done = syscall(SYS_write, fd, data, length);
    int error = errno;
    wrote(fd, path, data, done, at);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

static ssize_t wrote_at(int fd, const void *data, size_t length, off_t at) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return syscall(SYS_pwrite64, fd, data, length, at);
    pthread_mutex_lock(&lock);
    ssize_t done = syscall(SYS_pwrite64, fd, data, length, at);
    int error = errno;
    wrote(fd, path, data, done, at);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t at) { return wrote_at(fd, data, length, at); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) { return wrote_at(fd, data, length, at); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
    ssize_t total = 0;
    for (int i = 0; i < count; i++) {
        ssize_t done = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (done < 0) return total ? total : done;
        total += done;
        if ((size_t)done < parts[i].iov_len) break;
    }
    return total;
}

static int truncated(int fd, off_t size) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return (int)syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int done = (int)syscall(SYS_ftruncate, fd, size);
    if (!done) record(TRUNCATE, inode_of(fd), size, path, "", 0);
    pthread_mutex_unlock(&lock);
    return done;
}

int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncated(fd, size); }

/* Nothing is synced indeed: the record is what counts, and tests are not to wait for a disk. */
static int synced(int fd) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return 0;
    pthread_mutex_lock(&lock);
    record(SYNC, inode_of(fd), 0, path, "", 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

int fsync(int fd) { return synced(fd); }
int fdatasync(int fd) { return synced(fd); }

static int renamed(int from_at, const char *from, int to_at, const char *to) {
    char old[PATH_MAX], new[PATH_MAX];
    if (!path_at(from_at, from, old) || !path_at(to_at, to, new))
        return (int)syscall(SYS_renameat2, from_at, from, to_at, to, 0);
    pthread_mutex_lock(&lock);
    int done = (int)syscall(SYS_renameat2, from_at, from, to_at, to, 0);
    int error = errno;
    if (!done) record(RENAME, 0, 0, old, new, (int64_t)strlen(new));
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int from_at, const char *from, int to_at, const char *to) { return renamed(from_at, from, to_at, to); }

static int removed(int at, const char *name, int flags) {
    char path[PATH_MAX];
    if (!path_at(at, name, path)) return (int)syscall(SYS_unlinkat, at, name, flags);
    pthread_mutex_lock(&lock);
    int done = (int)syscall(SYS_unlinkat, at, name, flags);
    int error = errno;
    if (!done) record(UNLINK, 0, 0, path, "", 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

static int made(int at, const char *name, mode_t mode) {
    char path[PATH_MAX];
    int ours = path_at(at, name, path);
    pthread_mutex_lock(&lock);
    int done = (int)syscall(SYS_mkdirat, at, name, mode);
    int error = errno;
    if (!done && ours) record(FOLDER, 0, 0, path, "", 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return made(at, path, mode); }
