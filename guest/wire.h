/* State of the agent, buffers, frames and fields, and what children report. */
#ifndef DAYFLY_WIRE_H
#define DAYFLY_WIRE_H

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/random.h>
#include <linux/sched.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define VERSION "1"
#define PORT_NAME "dayfly.agent"

enum {
    HEADER = 12,
    MAX_PAYLOAD = 65536,
    WINDOW = 128 * 1024,           /* bytes that may be under way per stream and direction */
    CHUNK = 32 * 1024,             /* what one read from a pipe takes at most */
    MAX_REQUEST = 4 * 1024 * 1024, /* arguments and environment: the kernel takes 2 MiB of them */
    MAX_OUT = 512 * 1024,          /* waiting for the host; beyond the half of it nothing more is read */
    MAX_OPS = 256,
    MAX_LEFT = 256, /* pipes of ended programs that others still hold */
    MAX_ARGUMENTS = 65536,
    KILL_TIMEOUT_MS = 5000,
    ACK_TIMEOUT_MS = 60000,
    HOST_GONE_MS = 300,
    STATUS_MAX = 4096,
};

enum frame_type { REQUEST = 1, REPLY, ERROR, DATA, END, CREDIT, CANCEL, PING, PONG, STARTED };
enum { MORE = 1 }; /* flag of a REQUEST that goes on in the next one */
enum state { WAITING, CONFIRMED, READY, STOPPING };
enum space { WORK, VERIFY, OURS };
enum kind { EXEC, HELPER, FORWARD };

/* --- small things ---------------------------------------------------------------------------------------- */

struct buffer {
    uint8_t *data;
    size_t start, length, capacity;
};

static struct {
    bool plain; /* an ordinary process for tests: no mounts, namespaces, cgroups, users */
    enum state state;
    int port, signals, proc, urandom;
    int own_pids, outer_pids, work_pids, work_mounts, verify_mounts, cgroups_ns, work_pts;
    int work_go, work_report; /* to and from the workload's init until the set-up is done */
    char base_disk[16], work_disk[16];
    char work_pid[32];        /* as the agent knows it */
    bool frozen;
    bool privileged; /* the workload is a builder: its root keeps every capability */
    bool host_seen;
    int64_t host_gone_since;
    struct buffer in, out, request;
    uint32_t request_id;
    bool request_open;
    int exec_count;
    int64_t memory_limit;
    int64_t memory_seen;
    char hostname[65], machine_id[40], boot_id[40];
    char workdir[PATH_MAX];
    char made[16][64]; /* mount points that we had to make: not changes of the workload */
    int made_count;
    char stale[64][48]; /* cgroups that were not empty when their program ended */
    int stale_count;
    int left[MAX_LEFT]; /* pipes read and dropped, so that late writers neither block nor get SIGPIPE */
    int left_count;
} g = {.port = -1, .signals = -1, .proc = -1, .urandom = -1, .own_pids = -1, .outer_pids = -1, .work_pids = -1,
       .work_mounts = -1, .verify_mounts = -1, .cgroups_ns = -1, .work_pts = -1};

static void say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    dprintf(2, "dayfly agent: ");
    vdprintf(2, format, args);
    dprintf(2, "\n");
    va_end(args);
}

static void power_off(void) {
    sync();
    if (g.plain) _exit(0);
    reboot(RB_POWER_OFF);
    reboot(RB_AUTOBOOT);
    for (;;) pause();
}

/* Nothing can be done about it in here: say so on the console and end the VM, which the host sees at once. */
static void die(const char *what) {
    say("%s: %s", what, strerror(errno));
    if (g.plain) _exit(1);
    power_off();
}

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int64_t wall_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void buffer_add(struct buffer *b, const void *data, size_t length) {
    if (b->start > 0 && b->length == 0) b->start = 0;
    if (b->start + b->length + length > b->capacity) {
        if (b->start > 0) {
            memmove(b->data, b->data + b->start, b->length);
            b->start = 0;
        }
        if (b->length + length > b->capacity) {
            size_t capacity = b->capacity ? b->capacity : 4096;
            while (capacity < b->length + length) capacity *= 2;
            uint8_t *grown = realloc(b->data, capacity);
            if (grown == NULL) die("out of memory");
            b->data = grown;
            b->capacity = capacity;
        }
    }
    memcpy(b->data + b->start + b->length, data, length);
    b->length += length;
}

static void buffer_take(struct buffer *b, size_t length) {
    b->start += length;
    b->length -= length;
    if (b->length == 0) b->start = 0;
}

static void buffer_free(struct buffer *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static bool write_all(int fd, const void *data, size_t length) {
    const uint8_t *p = data;
    while (length > 0) {
        ssize_t n = write(fd, p, length);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        p += n;
        length -= (size_t)n;
    }
    return true;
}

static bool put_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return false;
    bool done = write_all(fd, text, strlen(text));
    close(fd);
    return done;
}

static ssize_t read_file(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, text, size - 1);
    close(fd);
    if (n >= 0) text[n] = 0;
    return n;
}

static int64_t read_number(const char *path) {
    char text[64];
    return read_file(path, text, sizeof text) > 0 ? strtoll(text, NULL, 10) : 0;
}

/* The number behind `key ` in a file of `key number` lines, as cgroups have. */
static int64_t read_keyed(const char *path, const char *key) {
    char text[1024], *line, *rest = text;
    if (read_file(path, text, sizeof text) <= 0) return 0;
    while ((line = strsep(&rest, "\n")) != NULL)
        if (strncmp(line, key, strlen(key)) == 0 && line[strlen(key)] == ' ') return strtoll(line + strlen(key), NULL, 10);
    return 0;
}

/* --- frames and fields ----------------------------------------------------------------------------------- */

static uint32_t get_u32(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }

static void set_le(uint8_t *p, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) p[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_le(const uint8_t *p, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)p[i] << (8 * i);
    return value;
}

static void send_frame(enum frame_type type, uint8_t channel, uint32_t id, const void *payload, size_t length) {
    uint8_t header[HEADER];
    set_le(header, length, 4);
    header[4] = type;
    header[5] = channel;
    set_le(header + 6, 0, 2);
    set_le(header + 8, id, 4);
    buffer_add(&g.out, header, HEADER);
    if (length > 0) buffer_add(&g.out, payload, length);
}

/* A field is: u8 length of the key, key, u32 length of the value, value. */
static void add_field(struct buffer *b, const char *key, const void *value, size_t length) {
    uint8_t key_length = (uint8_t)strlen(key), size[4];
    set_le(size, length, 4);
    buffer_add(b, &key_length, 1);
    buffer_add(b, key, key_length);
    buffer_add(b, size, 4);
    if (length > 0) buffer_add(b, value, length);
}

static void add_text(struct buffer *b, const char *key, const char *value) { add_field(b, key, value, strlen(value)); }

static void add_number(struct buffer *b, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    add_text(b, key, text);
}

struct fields {
    const uint8_t *data;
    size_t length;
};

struct span {
    const uint8_t *data;
    size_t length;
};

/* The next field from `*at`; false at the end, or where the rest is not a field. */
static bool next_field(const struct fields *f, size_t *at, struct span *key, struct span *value) {
    if (*at >= f->length) return false;
    size_t key_length = f->data[*at], rest = f->length - *at - 1;
    if (rest < key_length + 4) return false;
    key->data = f->data + *at + 1;
    key->length = key_length;
    value->data = key->data + key_length + 4;
    value->length = get_u32(key->data + key_length);
    if (value->length > rest - key_length - 4) return false;
    *at += 1 + key_length + 4 + value->length;
    return true;
}

static bool is_key(const struct span *key, const char *name) {
    return key->length == strlen(name) && memcmp(key->data, name, key->length) == 0;
}

static bool find_field(const struct fields *f, const char *name, struct span *value) {
    struct span key;
    for (size_t at = 0; next_field(f, &at, &key, value);)
        if (is_key(&key, name)) return true;
    return false;
}

/* A field as text of at most size - 1 bytes; false when it is absent, too long, or holds a NUL. */
static bool text_field(const struct fields *f, const char *name, char *text, size_t size) {
    struct span value;
    text[0] = 0;
    if (!find_field(f, name, &value) || value.length >= size || memchr(value.data, 0, value.length)) return false;
    memcpy(text, value.data, value.length);
    text[value.length] = 0;
    return true;
}

static int64_t number_field(const struct fields *f, const char *name, int64_t otherwise) {
    char text[32];
    return text_field(f, name, text, sizeof text) && text[0] ? strtoll(text, NULL, 10) : otherwise;
}

static void send_fields(enum frame_type type, uint32_t id, struct buffer *b) {
    send_frame(type, 0, id, b->data + b->start, b->length);
    buffer_free(b);
}

static void send_ok(uint32_t id) { send_frame(REPLY, 0, id, NULL, 0); }

static void send_error(uint32_t id, const char *cause, const char *message) {
    struct buffer b = {0};
    add_text(&b, "cause", cause);
    add_text(&b, "message", message);
    send_fields(ERROR, id, &b);
}

/* --- what a child process reports -------------------------------------------------------------------------
 * A status pipe carries one message: '+' and the fields of the reply, or '-' and the fields of the error. For a
 * program it is closed by execve, and nothing in it means that the program started. */

static int status_fd = -1; /* in a child: the writing end */

static void finish(char sign, struct buffer *b) __attribute__((noreturn));
static void finish(char sign, struct buffer *b) {
    struct buffer whole = {0};
    buffer_add(&whole, &sign, 1);
    if (b->length > 0) buffer_add(&whole, b->data + b->start, b->length < STATUS_MAX - 1 ? b->length : STATUS_MAX - 1);
    write_all(status_fd, whole.data, whole.length);
    _exit(sign == '+' ? 0 : 1);
}

static void refuse(const char *cause, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
static void refuse(const char *cause, const char *format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    struct buffer b = {0};
    add_text(&b, "cause", cause);
    add_text(&b, "message", message);
    finish('-', &b);
}

/* The stable word for an errno, as the host's error tree knows it. */
static const char *cause_of(int error) {
    switch (error) {
    case ENOENT: case ENOTDIR: return "not_found";
    case EACCES: case EPERM: return "permission";
    case ENOSPC: case EDQUOT: return "disk_full";
    case E2BIG: case ENAMETOOLONG: case EFBIG: case EMFILE: return "limit";
    case ENOMEM: return "no_memory";
    default: return "guest_io";
    }
}

static void refuse_errno(const char *what) __attribute__((noreturn));
static void refuse_errno(const char *what) { refuse(cause_of(errno), "%s: %s", what, strerror(errno)); }

#endif
