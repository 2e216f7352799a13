/* dayfly's guest agent: PID 1 of a microVM, and the only program of ours in it.
 *
 * One thread, one poll loop. Frames come in over a virtio-serial port (PROTOCOL.md is the contract); each request
 * becomes an `op`. The loop itself never touches the workload's files: whatever could hang or run out of memory on
 * them (put, get, remove, changes) runs in a helper process, and the loop only moves bytes between pipes and the
 * port. So a heartbeat is answered whatever the workload does.
 *
 * Processes of a guest:
 *     agent                       pid 1, all capabilities, protected from the OOM killer
 *     ├─ outer init               pid 1 of the outer pid namespace: the verifier's processes live there
 *     │   └─ work init            pid 1 of the inner pid namespace: the workload's processes live there
 *     └─ helpers                  short-lived, one for each file request
 * A process of `work` cannot name one outside the inner namespace; `verify` sees the workload but not the agent.
 */
#define _GNU_SOURCE
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

#include "sha256.h"

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

/* --- entering a space -------------------------------------------------------------------------------------- */

/* fork() whose child is in another pid namespace and cgroup from its first instruction. */
static pid_t fork_in(int pids, int cgroup) {
    if (pids >= 0 && setns(pids, CLONE_NEWPID) < 0) return -1;
    struct clone_args args = {.exit_signal = SIGCHLD};
    if (cgroup >= 0) {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)cgroup;
    }
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    int error = errno;
    if (pid != 0 && pids >= 0 && setns(g.own_pids, CLONE_NEWPID) < 0) die("own pid namespace");
    errno = error;
    return pid;
}

static void set_oom_score(const char *score) {
    int fd = g.proc >= 0 ? openat(g.proc, "self/oom_score_adj", O_WRONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    write_all(fd, score, strlen(score));
    close(fd);
}

static void default_signals(void) {
    sigset_t none;
    struct sigaction action = {.sa_handler = SIG_DFL};
    for (int i = 1; i < NSIG; i++) sigaction(i, &action, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static void enter_mounts(enum space space) {
    int fd = space == VERIFY ? g.verify_mounts : g.work_mounts;
    if (g.plain || space == OURS) return;
    if (setns(fd, CLONE_NEWNS) < 0) refuse("guest_io", "the mount namespace cannot be entered: %s", strerror(errno));
}

/* --- users --------------------------------------------------------------------------------------------------- */

struct user {
    uid_t uid;
    gid_t gid;
    gid_t groups[64];
    int group_count;
    char home[PATH_MAX];
};

/* The whole of a small file of the image; the image may have put anything there. */
static char *slurp(const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return NULL;
    char *text = NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size < 4 * 1024 * 1024 && (text = malloc((size_t)st.st_size + 1))) {
        ssize_t n = read(fd, text, (size_t)st.st_size);
        text[n > 0 ? n : 0] = 0;
    }
    close(fd);
    return text;
}

/* Split a line of passwd or group in place; the number of parts. */
static int split_line(char *line, char *parts[], int max) {
    int count = 0;
    char *part;
    while (count < max && (part = strsep(&line, ":")) != NULL) parts[count++] = part;
    return count;
}

static bool is_number(const char *text) {
    if (!*text) return false;
    for (; *text; text++)
        if (!isdigit((unsigned char)*text)) return false;
    return true;
}

/* A user's line by name, or by uid when the name is a number and no user's name. */
static bool find_user(const char *wanted, struct user *user, char *name, size_t name_size) {
    for (int by_number = 0; by_number < 2; by_number++) {
        char *text = slurp("/etc/passwd"), *rest = text, *line, *part[7];
        if (by_number && !is_number(wanted)) {
            free(text);
            return false;
        }
        while (text && (line = strsep(&rest, "\n")) != NULL) {
            if (split_line(line, part, 7) < 6) continue;
            bool match = by_number ? is_number(part[2]) && strtoul(part[2], NULL, 10) == strtoul(wanted, NULL, 10)
                                   : strcmp(part[0], wanted) == 0;
            if (!match) continue;
            user->uid = (uid_t)strtoul(part[2], NULL, 10);
            user->gid = (gid_t)strtoul(part[3], NULL, 10);
            if (*part[5]) snprintf(user->home, sizeof user->home, "%s", part[5]);
            snprintf(name, name_size, "%s", part[0]);
            free(text);
            return true;
        }
        free(text);
    }
    return false;
}

static bool find_group(const char *wanted, gid_t *gid) {
    char *text = slurp("/etc/group"), *rest = text, *line, *part[4];
    bool found = false;
    while (!found && text && (line = strsep(&rest, "\n")) != NULL)
        if (split_line(line, part, 4) >= 3 && strcmp(part[0], wanted) == 0) {
            *gid = (gid_t)strtoul(part[2], NULL, 10);
            found = true;
        }
    free(text);
    if (!found && is_number(wanted)) {
        *gid = (gid_t)strtoul(wanted, NULL, 10);
        found = true;
    }
    return found;
}

static void find_memberships(const char *name, struct user *user) {
    char *text = slurp("/etc/group"), *rest = text, *line, *part[4], *member;
    while (text && (line = strsep(&rest, "\n")) != NULL) {
        if (split_line(line, part, 4) < 4) continue;
        while ((member = strsep(&part[3], ",")) != NULL)
            if (strcmp(member, name) == 0 && user->group_count < 64)
                user->groups[user->group_count++] = (gid_t)strtoul(part[2], NULL, 10);
    }
    free(text);
}

/* `name`, `uid`, `name:group` or `uid:gid`, as Docker reads them: only without a group do memberships count. */
static void resolve_user(const char *wanted, struct user *user) {
    char text[256], name[256] = "";
    memset(user, 0, sizeof *user);
    snprintf(text, sizeof text, "%s", *wanted ? wanted : "0");
    char *group = strchr(text, ':');
    if (group) *group++ = 0;
    strcpy(user->home, "/");
    if (!find_user(*text ? text : "0", user, name, sizeof name)) {
        if (!is_number(*text ? text : "0")) refuse("unknown_user", "there is no user %s in the image", text);
        user->uid = (uid_t)strtoul(text, NULL, 10);
        if (user->uid == 0) strcpy(user->home, "/root");
    }
    if (group && *group) {
        if (!find_group(group, &user->gid)) refuse("unknown_user", "there is no group %s in the image", group);
    } else if (*name)
        find_memberships(name, user);
}

/* --- exec: the child's side -------------------------------------------------------------------------------- */

struct program {
    char **argv, **envp;
    int envc;
    char cwd[PATH_MAX], user[256];
    bool make_cwd;
    enum space space;
    int in, out, err; /* what becomes 0, 1, 2 */
    bool terminal;
};

static void make_folders(char *path) {
    for (char *p = path + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(path, 0755);
            *p = '/';
        }
    mkdir(path, 0755);
}

/* Docker's default set. CAP_MKNOD is harmless: whatever the workload can write to is mounted nodev. */
static const int kept_capabilities[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FSETID, CAP_FOWNER, CAP_MKNOD, CAP_NET_RAW, CAP_SETGID,
                                        CAP_SETUID, CAP_SETFCAP, CAP_SETPCAP, CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT, CAP_KILL,
                                        CAP_AUDIT_WRITE};

static void drop_capabilities(void) {
    uint64_t kept = 0;
    for (size_t i = 0; i < sizeof kept_capabilities / sizeof *kept_capabilities; i++) kept |= 1ull << kept_capabilities[i];
    for (int i = 0; i < 64; i++)
        if (!(kept >> i & 1) && prctl(PR_CAPBSET_DROP, i, 0, 0, 0) < 0 && errno != EINVAL) refuse_errno("capabilities");
}

static void set_limit(int what, rlim_t soft, rlim_t hard) {
    struct rlimit limit = {soft, hard};
    setrlimit(what, &limit);
}

static void become(const struct user *user) {
    set_limit(RLIMIT_NOFILE, 1024, 1048576);
    set_limit(RLIMIT_CORE, 0, RLIM_INFINITY);
    set_limit(RLIMIT_NPROC, RLIM_INFINITY, RLIM_INFINITY); /* pids.max is the limit */
    drop_capabilities();
    if (setgroups((size_t)user->group_count, user->groups) < 0 || setresgid(user->gid, user->gid, user->gid) < 0 ||
        setresuid(user->uid, user->uid, user->uid) < 0)
        refuse_errno("user");
    if (user->uid == 0) {
        /* execve gives root the bounding set; here we only give up the rest before that */
        struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct data[2] = {{0}};
        for (size_t i = 0; i < sizeof kept_capabilities / sizeof *kept_capabilities; i++) {
            data[kept_capabilities[i] / 32].effective |= 1u << kept_capabilities[i] % 32;
            data[kept_capabilities[i] / 32].permitted |= 1u << kept_capabilities[i] % 32;
        }
        if (syscall(SYS_capset, &header, data) < 0) refuse_errno("capabilities");
    }
}

static const char *get_env(const struct program *p, const char *name) {
    size_t length = strlen(name);
    for (int i = 0; i < p->envc; i++)
        if (strncmp(p->envp[i], name, length) == 0 && p->envp[i][length] == '=') return p->envp[i] + length + 1;
    return NULL;
}

/* envp has room for these: see parse_program. */
static void default_env(struct program *p, const char *name, const char *value) {
    static char text[4][PATH_MAX + 32];
    static int used;
    if (get_env(p, name) != NULL) return;
    snprintf(text[used], sizeof text[used], "%s=%s", name, value);
    p->envp[p->envc++] = text[used++];
    p->envp[p->envc] = NULL;
}

static void refuse_program(const char *name) __attribute__((noreturn));
static void refuse_program(const char *name) {
    switch (errno) {
    case ENOENT: case ENOTDIR: refuse("not_found", "%s: no such program (or its interpreter) in the guest", name);
    case EACCES: case ENOEXEC: case EISDIR: refuse("not_executable", "%s: not an executable program: %s", name, strerror(errno));
    case E2BIG: refuse("limit", "arguments and environment together are over the kernel's limit of 2 MiB");
    default: refuse(cause_of(errno), "%s: cannot be started: %s", name, strerror(errno));
    }
}

/* execve along the PATH of the program's own environment. */
static void exec_along_path(const struct program *p) __attribute__((noreturn));
static void exec_along_path(const struct program *p) {
    const char *name = p->argv[0], *path = get_env(p, "PATH");
    int error = ENOENT;
    if (strchr(name, '/') || !*name) {
        execve(name, p->argv, p->envp);
        refuse_program(name);
    }
    while (path && *path) {
        char full[PATH_MAX];
        size_t length = strcspn(path, ":");
        snprintf(full, sizeof full, "%.*s%s%s", (int)length, path, length ? "/" : "", name);
        execve(full, p->argv, p->envp);
        if (errno != ENOENT && errno != ENOTDIR) error = errno;
        if (errno == E2BIG) break;
        path += length + (path[length] == ':');
    }
    errno = error;
    refuse_program(name);
}

static void run_program(struct program *p) __attribute__((noreturn));
static void run_program(struct program *p) {
    struct user user;
    default_signals();
    set_oom_score(p->space == VERIFY ? "-500" : "0"); /* the workload goes first, not its judge */
    setsid();
    if (p->terminal && ioctl(p->in, TIOCSCTTY, 0) < 0) refuse_errno("terminal");
    if (!g.plain && g.cgroups_ns >= 0 && setns(g.cgroups_ns, CLONE_NEWCGROUP) < 0) refuse_errno("cgroup namespace");
    enter_mounts(p->space);
    if (p->in < 0 && (p->in = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0) refuse_errno("/dev/null");
    if (dup2(p->in, 0) < 0 || dup2(p->out, 1) < 0 || dup2(p->err, 2) < 0) refuse_errno("standard streams");
    umask(022);
    if (g.plain && geteuid() != 0)
        memset(&user, 0, sizeof user);
    else
        resolve_user(p->user, &user);
    if (p->make_cwd) make_folders(p->cwd);
    if (chdir(p->cwd) < 0) refuse(errno == ENOENT || errno == ENOTDIR ? "no_cwd" : cause_of(errno),
                                  "the working directory %s cannot be entered: %s", p->cwd, strerror(errno));
    if (p->terminal) {
        if (fchown(0, user.uid, (gid_t)-1) < 0) refuse_errno("terminal");
        default_env(p, "TERM", "xterm");
    }
    default_env(p, "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    default_env(p, "HOME", user.home);
    default_env(p, "HOSTNAME", g.hostname);
    if (!g.plain) become(&user);
    exec_along_path(p);
}

/* --- archives ------------------------------------------------------------------------------------------------
 * The same format in both directions; see PROTOCOL.md. Runs in helpers only. */

enum { A_END, A_FILE, A_DIR, A_LINK, A_SKIPPED };
enum { ENTRY = 28, PIECE = 12, MAX_DEPTH = 500 };
#define NOBODY UINT32_MAX /* owner not given */

struct entry {
    uint8_t kind;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    char path[PATH_MAX], target[PATH_MAX];
};

struct archive {
    int fd;
    struct sha256 digest;
    uint64_t files, bytes;
    uint64_t max_files, max_bytes, max_file_bytes, max_depth; /* reading from the guest only */
    uint8_t *chunk, *read; /* CHUNK bytes each: one piece of a file; what came and is still to be parsed */
    size_t read_at, read_end;
    struct buffer out;
};

static void archive_start(struct archive *a, int fd) {
    memset(a, 0, sizeof *a);
    a->fd = fd;
    a->chunk = malloc(CHUNK);
    a->read = malloc(CHUNK);
    if (a->chunk == NULL || a->read == NULL) refuse("no_memory", "out of memory");
    sha256_start(&a->digest);
}

/* What both sides hash: kind, mode, path and target, but neither time nor owner. */
static void hash_entry(struct archive *a, const struct entry *e) {
    uint8_t head[9];
    size_t path = strlen(e->path), target = strlen(e->target);
    head[0] = e->kind;
    set_le(head + 1, e->mode, 4);
    set_le(head + 5, path, 2);
    set_le(head + 7, target, 2);
    sha256_add(&a->digest, head, 9);
    sha256_add(&a->digest, e->path, path);
    sha256_add(&a->digest, e->target, target);
}

/* --- reading an archive: put --- */

static void need(struct archive *a, void *data, size_t length) {
    uint8_t *to = data;
    while (length > 0) {
        if (a->read_at == a->read_end) {
            ssize_t n = read(a->fd, a->read, CHUNK);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) refuse("broken_archive", "the archive ends in the middle");
            a->read_at = 0;
            a->read_end = (size_t)n;
        }
        size_t take = a->read_end - a->read_at < length ? a->read_end - a->read_at : length;
        memcpy(to, a->read + a->read_at, take);
        a->read_at += take;
        to += take;
        length -= take;
    }
}

static void read_entry(struct archive *a, struct entry *e) {
    uint8_t head[ENTRY];
    need(a, head, ENTRY);
    size_t path = get_le(head + 2, 2), target = get_le(head + 24, 2);
    if (path >= PATH_MAX || target >= PATH_MAX) refuse("limit", "a path is longer than %d bytes", PATH_MAX - 1);
    e->kind = head[0];
    e->mode = (uint32_t)get_le(head + 4, 4);
    e->uid = (uint32_t)get_le(head + 8, 4);
    e->gid = (uint32_t)get_le(head + 12, 4);
    e->mtime_ns = (int64_t)get_le(head + 16, 8);
    need(a, e->path, path);
    need(a, e->target, target);
    e->path[path] = e->target[target] = 0;
}

/* The folder that an entry goes to, each component a real folder (a link in between is refused, not followed). */
static int open_parent(int root, const char *path, const char **name) {
    int at = dup(root);
    const char *slash;
    while ((slash = strchr(path, '/')) != NULL) {
        char part[NAME_MAX + 1];
        size_t length = (size_t)(slash - path);
        if (length == 0 || length > NAME_MAX) refuse("limit", "a name in %s is empty or too long", path);
        memcpy(part, path, length);
        part[length] = 0;
        int next = openat(at, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (next < 0 && errno == ENOENT && mkdirat(at, part, 0755) == 0)
            next = openat(at, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        close(at);
        if (next < 0) refuse_errno(part);
        at = next;
        path = slash + 1;
    }
    *name = path;
    return at;
}

/* Make way for a file or link. A mount point (/etc/hosts) cannot be removed: it is then written in place. */
static bool clear_way(int at, const char *name) {
    if (unlinkat(at, name, 0) == 0 || errno == ENOENT) return true;
    if (errno == EBUSY) return false;
    if (errno == EISDIR) refuse("is_a_folder", "%s is a folder in the guest", name);
    refuse_errno(name);
}

/* Owner, mode and time of an open file, or of the link or folder `name` (then `fd` is its parent). Each call costs
 * as much as all the rest of a small file, so those that would change nothing are left out. */
static void set_owner_and_time(int fd, const char *name, const struct entry *e, const struct user *owner) {
    uid_t uid = e->uid == NOBODY ? owner->uid : e->uid;
    gid_t gid = e->gid == NOBODY ? owner->gid : e->gid;
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {e->mtime_ns / 1000000000, e->mtime_ns % 1000000000}};
    bool file = e->kind == A_FILE, chown = !g.plain && (uid != 0 || gid != 0 || !file);
    if (chown && fchownat(fd, file ? "" : name, uid, gid, AT_SYMLINK_NOFOLLOW | (file ? AT_EMPTY_PATH : 0)) < 0) refuse_errno(name);
    /* after chown, which clears the set-uid bits */
    if (file && (chown || e->mode & 07000) && fchmod(fd, e->mode & 07777) < 0) refuse_errno(name);
    if (e->kind == A_DIR && fchmodat(fd, name, e->mode & 07777, 0) < 0) refuse_errno(name);
    if ((file ? futimens(fd, times) : utimensat(fd, name, times, AT_SYMLINK_NOFOLLOW)) < 0) refuse_errno(name);
}

static void receive_content(struct archive *a, int fd, const char *name) {
    for (uint64_t end = 0;;) {
        uint8_t head[PIECE];
        need(a, head, PIECE);
        uint64_t offset = get_le(head, 8);
        uint32_t length = get_u32(head + 8);
        if (length > CHUNK || offset > INT64_MAX - CHUNK) refuse("broken_archive", "a piece of %s is out of bounds", name);
        need(a, a->chunk, length);
        sha256_add(&a->digest, head, PIECE);
        sha256_add(&a->digest, a->chunk, length);
        if (length == 0) {
            if (offset != end && ftruncate(fd, (off_t)offset) < 0) refuse_errno(name);
            a->bytes += offset;
            return;
        }
        for (size_t done = 0; done < length;) {
            ssize_t n = pwrite(fd, a->chunk + done, length - done, (off_t)(offset + done));
            if (n <= 0) refuse_errno(name);
            done += (size_t)n;
        }
        end = offset + length;
    }
}

static void receive_file(struct archive *a, int at, const char *name, const struct entry *e, const struct user *owner) {
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(at, name, flags, e->mode & 0777);
    if (fd < 0 && errno == EEXIST) {
        bool gone = clear_way(at, name);
        fd = openat(at, name, gone ? flags : O_WRONLY | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, e->mode & 0777);
        if (fd >= 0 && !gone) fchmod(fd, e->mode & 0777);
    }
    if (fd < 0) refuse_errno(name);
    receive_content(a, fd, name);
    set_owner_and_time(fd, name, e, owner);
    if (close(fd) < 0) refuse_errno(name);
    a->files++;
}

static void receive_folder(int at, const char *name) {
    struct stat st;
    if (mkdirat(at, name, 0755) == 0) return;
    if (errno != EEXIST || fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0) refuse_errno(name);
    if (S_ISDIR(st.st_mode)) return;
    if (!clear_way(at, name) || mkdirat(at, name, 0755) < 0) refuse_errno(name);
}

static void receive_entry(struct archive *a, int root, const struct entry *e, const struct user *owner) {
    const char *name;
    hash_entry(a, e);
    int at = open_parent(root, e->path, &name);
    if (!*name || !strcmp(name, ".") || !strcmp(name, "..")) refuse("broken_archive", "bad name in the archive");
    switch (e->kind) {
    case A_FILE: receive_file(a, at, name, e, owner); break;
    case A_DIR: receive_folder(at, name); break;
    case A_LINK:
        if (!clear_way(at, name) || symlinkat(e->target, at, name) < 0) refuse_errno(name);
        break;
    default: refuse("broken_archive", "unknown kind of entry in the archive");
    }
    if (e->kind == A_LINK) set_owner_and_time(at, name, e, owner);
    close(at);
}

/* The folder below which everything is put; it and its parents are made. Links in it are the image's own. */
static int open_destination(char *path) {
    make_folders(path);
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0) refuse_errno(path);
    return fd;
}

static void finish_transfer(struct archive *a) __attribute__((noreturn));
static void finish_transfer(struct archive *a) {
    struct buffer b = {0};
    uint8_t digest[32];
    sha256_end(&a->digest, digest);
    add_number(&b, "files", (int64_t)a->files);
    add_number(&b, "bytes", (int64_t)a->bytes);
    add_field(&b, "digest", digest, 32);
    finish('+', &b);
}

/* Folders get their mode and time last: what is put into them would change the time. */
struct late {
    struct late *next;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    char path[];
};

static struct late *remember_folder(struct late *rest, const struct entry *e) {
    struct late *late = malloc(sizeof *late + strlen(e->path) + 1);
    if (late == NULL) refuse("no_memory", "out of memory");
    *late = (struct late){rest, e->mode, e->uid, e->gid, e->mtime_ns};
    strcpy(late->path, e->path);
    return late;
}

static void finish_folders(int root, struct late *folders, struct entry *e, const struct user *owner) {
    for (; folders; folders = folders->next) {
        const char *name;
        *e = (struct entry){.kind = A_DIR, .mode = folders->mode, .uid = folders->uid, .gid = folders->gid, .mtime_ns = folders->mtime_ns};
        int at = open_parent(root, folders->path, &name);
        set_owner_and_time(at, name, e, owner);
        close(at);
    }
}

static void help_put(const struct fields *f, int in) {
    struct archive a;
    struct user owner;
    struct late *folders = NULL;
    char dest[PATH_MAX], user[256], space[8];
    if (!text_field(f, "dest", dest, sizeof dest)) refuse("bad_request", "bad destination");
    text_field(f, "user", user, sizeof user);
    text_field(f, "space", space, sizeof space);
    enter_mounts(!strcmp(space, "verify") ? VERIFY : WORK);
    if (g.plain) memset(&owner, 0, sizeof owner); else resolve_user(user, &owner);
    umask(0);
    archive_start(&a, in);
    int root = open_destination(dest);
    struct entry *e = malloc(sizeof *e);
    for (;;) {
        if (e == NULL) refuse("no_memory", "out of memory");
        read_entry(&a, e);
        if (e->kind == A_END) break;
        receive_entry(&a, root, e, &owner);
        if (e->kind == A_DIR) folders = remember_folder(folders, e);
    }
    finish_folders(root, folders, e, &owner);
    finish_transfer(&a);
}

/* --- writing an archive: get --- */

static void emit(struct archive *a, const void *data, size_t length) {
    buffer_add(&a->out, data, length);
    if (a->out.length < CHUNK) return;
    if (!write_all(a->fd, a->out.data + a->out.start, a->out.length)) _exit(1); /* nobody wants it any more */
    buffer_take(&a->out, a->out.length);
}

static void emit_entry(struct archive *a, const struct entry *e) {
    uint8_t head[ENTRY] = {e->kind};
    size_t path = strlen(e->path), target = strlen(e->target);
    set_le(head + 2, path, 2);
    set_le(head + 4, e->mode, 4);
    set_le(head + 8, e->uid, 4);
    set_le(head + 12, e->gid, 4);
    set_le(head + 16, (uint64_t)e->mtime_ns, 8);
    set_le(head + 24, target, 2);
    emit(a, head, ENTRY);
    emit(a, e->path, path);
    emit(a, e->target, target);
    if (e->kind != A_SKIPPED && e->kind != A_END && !(e->kind == A_DIR && !*e->path)) hash_entry(a, e);
}

static void emit_piece(struct archive *a, uint64_t offset, const void *data, size_t length) {
    uint8_t head[PIECE];
    set_le(head, offset, 8);
    set_le(head + 8, length, 4);
    emit(a, head, PIECE);
    emit(a, data, length);
    sha256_add(&a->digest, head, PIECE);
    sha256_add(&a->digest, data, length);
}

static bool all_zero(const uint8_t *p, size_t length) { return length == 0 || (p[0] == 0 && memcmp(p, p + 1, length - 1) == 0); }

/* Pieces are cut at multiples of CHUNK and left out when zero, so that the digest does not depend on how a file
 * system happened to lay the file out. The size is what it was at the start: a growing file ends somewhere. */
static void emit_content(struct archive *a, int fd, const struct stat *st, const char *path) {
    uint64_t size = (uint64_t)st->st_size, at = 0, limit = size ? size : 1024 * 1024; /* /proc says 0 */
    if (size > a->max_file_bytes || a->bytes + size > a->max_bytes)
        refuse("limit", "%s: over the limit of the transfer (%llu bytes a file, %llu in all)", path,
               (unsigned long long)a->max_file_bytes, (unsigned long long)a->max_bytes);
    while (at < limit) {
        off_t data = size ? lseek(fd, (off_t)at, SEEK_DATA) : -1;
        if (size && data < 0 && errno == ENXIO) break;
        if (data > (off_t)at) at = (uint64_t)data / CHUNK * CHUNK;
        if (at >= limit) break;
        size_t want = limit - at < CHUNK ? limit - at : CHUNK, have = 0;
        while (have < want) {
            ssize_t n = pread(fd, a->chunk + have, want - have, (off_t)(at + have));
            if (n < 0) refuse_errno(path);
            if (n == 0) break;
            have += (size_t)n;
        }
        if (have > 0 && !all_zero(a->chunk, have)) emit_piece(a, at, a->chunk, have);
        at += have;
        if (have < want) break;
    }
    uint64_t end = size ? size : at;
    a->bytes += end;
    emit_piece(a, end, "", 0);
}

static void fill_entry(struct entry *e, const struct stat *st, const char *path) {
    e->mode = st->st_mode & 07777;
    e->uid = st->st_uid;
    e->gid = st->st_gid;
    e->mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
    e->target[0] = 0;
    snprintf(e->path, sizeof e->path, "%s", path);
}

static void count_entry(struct archive *a) {
    if (++a->files > a->max_files) refuse("limit", "more than %llu files and folders", (unsigned long long)a->max_files);
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* The names in a folder, sorted by bytes; NULL-terminated. */
static char **list_folder(int fd, uint64_t max) {
    DIR *dir = fdopendir(dup(fd));
    struct dirent *d;
    size_t count = 0, room = 64;
    char **names = malloc(room * sizeof *names);
    if (dir == NULL || names == NULL) refuse_errno("folder");
    rewinddir(dir);
    while ((d = readdir(dir)) != NULL) {
        if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, "..")) continue;
        if (count > max) refuse("limit", "more than %llu names in one folder", (unsigned long long)max);
        if (count + 1 >= room) names = realloc(names, (room *= 2) * sizeof *names);
        if (names == NULL || (names[count++] = strdup(d->d_name)) == NULL) refuse("no_memory", "out of memory");
    }
    closedir(dir);
    names[count] = NULL;
    qsort(names, count, sizeof *names, by_name);
    return names;
}

/* Kernel interfaces are no files of the workload, and some never end. */
static bool is_kernel_fs(int fd) {
    struct statfs fs;
    if (fstatfs(fd, &fs) < 0) return true;
    switch ((unsigned long)fs.f_type) {
    case 0x9fa0: case 0x62656572: case 0x63677270: case 0x1cd1: case 0x19800202: return true; /* proc sys cgroup2 devpts mqueue */
    default: return false;
    }
}

static void emit_folder(struct archive *a, int fd, struct entry *e, size_t length, uint64_t depth);

static void emit_name(struct archive *a, int at, const char *name, struct entry *e, uint64_t depth) {
    struct stat st;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", e->path);
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0) return; /* gone meanwhile */
    fill_entry(e, &st, path);
    e->kind = S_ISREG(st.st_mode) ? A_FILE : S_ISDIR(st.st_mode) ? A_DIR : S_ISLNK(st.st_mode) ? A_LINK : A_SKIPPED;
    if (e->kind == A_LINK) {
        ssize_t n = readlinkat(at, name, e->target, sizeof e->target - 1);
        if (n < 0) return;
        e->target[n] = 0;
        count_entry(a);
        emit_entry(a, e);
    } else if (e->kind == A_SKIPPED) {
        count_entry(a);
        emit_entry(a, e);
    } else {
        int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (e->kind == A_DIR ? O_DIRECTORY : 0);
        int fd = openat(at, name, flags);
        if (fd < 0 && errno == ENOENT) return;
        if (fd < 0 || fstat(fd, &st) < 0) refuse_errno(path);
        bool same = e->kind == A_DIR ? S_ISDIR(st.st_mode) : S_ISREG(st.st_mode);
        if (!same || is_kernel_fs(fd)) e->kind = A_SKIPPED;
        count_entry(a);
        emit_entry(a, e);
        if (e->kind == A_FILE) emit_content(a, fd, &st, path);
        if (e->kind == A_DIR) emit_folder(a, fd, e, strlen(e->path), depth + 1);
        close(fd);
    }
}

static void emit_folder(struct archive *a, int fd, struct entry *e, size_t length, uint64_t depth) {
    if (depth > a->max_depth || depth > MAX_DEPTH) refuse("limit", "folders nested deeper than %llu", (unsigned long long)a->max_depth);
    char **names = list_folder(fd, a->max_files);
    for (char **name = names; *name; name++) {
        size_t more = strlen(*name) + 1;
        if (length + more >= PATH_MAX) refuse("limit", "a path is longer than %d bytes", PATH_MAX - 1);
        if (length) e->path[length] = '/';
        strcpy(e->path + length + (length > 0), *name);
        emit_name(a, fd, *name, e, depth);
        e->path[length] = 0;
        free(*name);
    }
    free(names);
}

static void help_get(const struct fields *f, int out) {
    struct archive a;
    struct entry *e = calloc(1, sizeof *e);
    struct stat st;
    char source[PATH_MAX], space[8];
    if (e == NULL || !text_field(f, "source", source, sizeof source)) refuse("bad_request", "bad source");
    text_field(f, "space", space, sizeof space);
    enter_mounts(!strcmp(space, "verify") ? VERIFY : WORK);
    set_limit(RLIMIT_NOFILE, 4096, 4096);
    archive_start(&a, out);
    a.max_files = (uint64_t)number_field(f, "max_files", 0);
    a.max_bytes = (uint64_t)number_field(f, "max_bytes", 0);
    a.max_file_bytes = (uint64_t)number_field(f, "max_file_bytes", 0);
    a.max_depth = (uint64_t)number_field(f, "max_depth", 0);
    struct open_how how = {.flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, source, &how, sizeof how);
    if (fd < 0 || fstat(fd, &st) < 0) refuse_errno(source);
    if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) refuse("not_a_file", "%s is neither a file nor a folder", source);
    fill_entry(e, &st, "");
    e->kind = S_ISDIR(st.st_mode) ? A_DIR : A_FILE;
    count_entry(&a);
    emit_entry(&a, e);
    if (e->kind == A_FILE) emit_content(&a, fd, &st, source);
    else emit_folder(&a, fd, e, 0, 1);
    fill_entry(e, &st, "");
    e->kind = A_END;
    emit_entry(&a, e);
    if (!write_all(out, a.out.data + a.out.start, a.out.length)) _exit(1);
    finish_transfer(&a);
}

/* --- remove, changes --------------------------------------------------------------------------------------- */

static void remove_tree(int at, const char *name, int depth) {
    struct stat st;
    if (unlinkat(at, name, 0) == 0 || errno == ENOENT) return;
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0) return;
    if (!S_ISDIR(st.st_mode)) refuse_errno(name);
    if (depth > MAX_DEPTH) refuse("limit", "folders nested deeper than %d", MAX_DEPTH);
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) refuse_errno(name);
    char **names = list_folder(fd, UINT32_MAX);
    for (char **n = names; *n; n++) {
        remove_tree(fd, *n, depth + 1);
        free(*n);
    }
    free(names);
    close(fd);
    if (unlinkat(at, name, AT_REMOVEDIR) < 0 && errno != ENOENT) refuse_errno(name);
}

static void help_remove(const struct fields *f) {
    struct buffer none = {0};
    char path[PATH_MAX], space[8];
    if (!text_field(f, "path", path, sizeof path) || path[0] != '/') refuse("bad_request", "bad path");
    text_field(f, "space", space, sizeof space);
    enter_mounts(!strcmp(space, "verify") ? VERIFY : WORK);
    set_limit(RLIMIT_NOFILE, 4096, 4096);
    remove_tree(AT_FDCWD, path, 0);
    finish('+', &none);
}

struct walk {
    int out, base;
    uint64_t budget, left; /* bytes still to be hashed; entries still to be told */
    uint8_t *chunk;
};

static bool is_made(const char *path) {
    for (int i = 0; i < g.made_count; i++)
        if (strcmp(g.made[i], path) == 0) return true;
    return false;
}

/* Copied up only because something in it changed: the same folder as in the image. */
static bool is_same_folder(struct walk *w, int fd, const struct stat *st, const char *path) {
    struct stat old;
    char opaque[2] = "";
    return fstatat(w->base, path, &old, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(old.st_mode) && old.st_mode == st->st_mode &&
           old.st_uid == st->st_uid && old.st_gid == st->st_gid &&
           (fgetxattr(fd, "trusted.overlay.opaque", opaque, 1) != 1 || opaque[0] != 'y');
}

static bool hash_file(struct walk *w, int fd, uint64_t size, uint8_t digest[32]) {
    struct sha256 hash;
    if (size > w->budget) return false;
    w->budget -= size;
    sha256_start(&hash);
    for (uint64_t at = 0; at < size;) {
        ssize_t n = pread(fd, w->chunk, CHUNK, (off_t)at);
        if (n <= 0) return false;
        sha256_add(&hash, w->chunk, (size_t)n);
        at += (uint64_t)n;
    }
    sha256_end(&hash, digest);
    return true;
}

/* u8 kind, u8 hashed, u16 length of the path, u32 mode, uid, gid, u64 size, 32 bytes of digest, path */
static void tell_change(struct walk *w, char kind, const struct stat *st, const uint8_t *digest, const char *path) {
    uint8_t head[56] = {(uint8_t)kind, digest != NULL};
    set_le(head + 2, strlen(path), 2);
    set_le(head + 4, st->st_mode & 07777, 4);
    set_le(head + 8, st->st_uid, 4);
    set_le(head + 12, st->st_gid, 4);
    set_le(head + 16, kind == 'f' || kind == 'l' ? (uint64_t)st->st_size : 0, 8);
    if (digest) memcpy(head + 24, digest, 32);
    if (w->left-- == 0) refuse("limit", "too many changed paths");
    if (!write_all(w->out, head, sizeof head) || !write_all(w->out, path, strlen(path))) _exit(1);
}

static void tell_link(struct walk *w, int at, const char *name, const struct stat *st, const char *path) {
    char target[PATH_MAX];
    uint8_t digest[32];
    struct sha256 hash;
    ssize_t n = readlinkat(at, name, target, sizeof target);
    sha256_start(&hash);
    sha256_add(&hash, target, n > 0 ? (size_t)n : 0);
    sha256_end(&hash, digest);
    tell_change(w, 'l', st, digest, path);
}

static void walk_folder(struct walk *w, int fd, char *path, size_t length, int depth) {
    if (depth > MAX_DEPTH) refuse("limit", "folders nested deeper than %d", MAX_DEPTH);
    char **names = list_folder(fd, UINT32_MAX);
    for (char **n = names; *n; free(*n++)) {
        struct stat st;
        uint8_t digest[32];
        if (length + strlen(*n) + 2 >= PATH_MAX || fstatat(fd, *n, &st, AT_SYMLINK_NOFOLLOW) < 0) continue;
        sprintf(path + length, "%s%s", length ? "/" : "", *n);
        if (is_made(path) || (S_ISCHR(st.st_mode) && st.st_rdev == 0)) {
            if (!is_made(path)) tell_change(w, 'x', &st, NULL, path);
        } else if (S_ISLNK(st.st_mode)) {
            tell_link(w, fd, *n, &st, path);
        } else if (S_ISREG(st.st_mode)) {
            int file = openat(fd, *n, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
            bool hashed = file >= 0 && hash_file(w, file, (uint64_t)st.st_size, digest);
            tell_change(w, 'f', &st, hashed ? digest : NULL, path);
            close_fd(&file);
        } else if (S_ISDIR(st.st_mode)) {
            int next = openat(fd, *n, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (next < 0) refuse_errno(path);
            if (!is_same_folder(w, next, &st, path)) tell_change(w, 'd', &st, NULL, path);
            walk_folder(w, next, path, strlen(path), depth + 1);
            close(next);
        } else
            tell_change(w, 'o', &st, NULL, path);
        path[length] = 0;
    }
    free(names);
}

static void help_changes(const struct fields *f, int out) {
    struct walk w = {.out = out, .budget = (uint64_t)number_field(f, "budget", 0), .left = 500000};
    struct buffer none = {0};
    char path[PATH_MAX] = "";
    if (g.plain) finish('+', &none);
    set_limit(RLIMIT_NOFILE, 4096, 4096);
    int upper = open("/run/work/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    w.base = open("/run/base", O_PATH | O_DIRECTORY | O_CLOEXEC);
    w.chunk = malloc(CHUNK);
    if (upper < 0 || w.base < 0 || w.chunk == NULL) refuse_errno("writable layer");
    walk_folder(&w, upper, path, 0, 0);
    finish('+', &none);
}

/* --- mounts of the workload -------------------------------------------------------------------------------- */

static int new_mount(const char *type, unsigned attributes, const char *const options[][2]) {
    int fs = (int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC), mounted = -1;
    for (int i = 0; fs >= 0 && options && options[i][0]; i++)
        if (syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, options[i][0], options[i][1], 0) < 0) close_fd(&fs);
    if (fs >= 0 && syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        mounted = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, attributes);
    close_fd(&fs);
    return mounted;
}

static int clone_tree(const char *path) { return (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC); }

static bool attach(int tree, const char *path) {
    return tree >= 0 && syscall(SYS_move_mount, tree, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS) == 0;
}

/* Keep a path out of `changes`: it is a mount point of ours. */
static void note_made(const char *path) {
    if (g.made_count < 16) snprintf(g.made[g.made_count++], sizeof g.made[0], "%s", path + 1);
}

/* A real folder at `path`, whatever the image or an earlier boot on this disk has there. */
static void need_folder(const char *path) {
    struct stat st;
    if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) return;
    unlink(path);
    if (mkdir(path, 0755) < 0 && errno != EEXIST) refuse_errno(path);
}

static void set_read_only(const char *path) {
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC};
    syscall(SYS_mount_setattr, AT_FDCWD, path, AT_RECURSIVE, &attributes, sizeof attributes);
}

static void mask(const char *path) {
    struct stat st;
    if (stat(path, &st) < 0) return;
    if (S_ISDIR(st.st_mode))
        attach(new_mount("tmpfs", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID, NULL), path);
    else
        mount("/dev/null", path, NULL, MS_BIND, NULL);
}

/* /proc of the caller's pid namespace, with what Docker hides and protects. `boot_id` is a mount of its own. */
static void mount_proc(int boot_id) {
    static const char *const masked[] = {"/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
                                         "/proc/timer_list", "/proc/sched_debug", "/proc/scsi", "/proc/kallsyms", "/proc/kpageflags",
                                         "/proc/kpagecount", "/proc/kpagecgroup", "/proc/kmsg"};
    static const char *const protected[] = {"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/proc/cmdline"};
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) refuse_errno("/proc");
    attach(boot_id, "/proc/sys/kernel/random/boot_id");
    for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) mask(masked[i]);
    for (size_t i = 0; i < sizeof protected / sizeof *protected; i++)
        if (mount(protected[i], protected[i], NULL, MS_BIND | MS_REC, NULL) == 0) set_read_only(protected[i]);
}

static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
enum { DEVICES = sizeof devices / sizeof *devices };

static void mount_dev(const int trees[DEVICES]) {
    static const char *const links[][2] = {{"/proc/self/fd", "/dev/fd"},   {"/proc/self/fd/0", "/dev/stdin"}, {"/proc/self/fd/1", "/dev/stdout"},
                                           {"/proc/self/fd/2", "/dev/stderr"}, {"pts/ptmx", "/dev/ptmx"}};
    char path[64], shm[64];
    if (mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m") < 0) refuse_errno("/dev");
    for (int i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", devices[i]);
        put_file(path, "");
        if (!attach(trees[i], path)) refuse_errno(path);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) symlink(links[i][0], links[i][1]);
    mkdir("/dev/pts", 0755);
    mkdir("/dev/shm", 01777);
    mkdir("/dev/mqueue", 0755);
    if (mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5") < 0) refuse_errno("/dev/pts");
    snprintf(shm, sizeof shm, "mode=1777,size=%lld", (long long)g.memory_limit / 2);
    if (mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, shm) < 0) refuse_errno("/dev/shm");
    mount("mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

/* Mounted over the image's, as Docker does, so that the image's own files and `changes` stay as they are. */
static const char *const etc_files[] = {"hostname", "hosts", "resolv.conf", "machine-id"};
enum { ETC_FILES = sizeof etc_files / sizeof *etc_files };

static void write_etc_files(void) {
    char text[512];
    mkdir("/run/etc", 0755);
    if (mount("tmpfs", "/run/etc", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=256k") < 0) refuse_errno("/run/etc");
    snprintf(text, sizeof text, "%s\n", g.hostname);
    put_file("/run/etc/hostname", text);
    snprintf(text, sizeof text, "127.0.0.1\tlocalhost %s\n::1\tlocalhost ip6-localhost ip6-loopback\n", g.hostname);
    put_file("/run/etc/hosts", text);
    put_file("/run/etc/resolv.conf", "");
    snprintf(text, sizeof text, "%s\n", g.machine_id);
    put_file("/run/etc/machine-id", text);
    snprintf(text, sizeof text, "%s\n", g.boot_id);
    put_file("/run/etc/boot_id", text);
}

static void mount_etc(const int trees[ETC_FILES]) {
    char path[64];
    if (mkdir("/etc", 0755) < 0 && errno != EEXIST) return;
    for (int i = 0; i < ETC_FILES; i++) {
        snprintf(path, sizeof path, "/etc/%s", etc_files[i]);
        int fd = open(path, O_RDONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644);
        if (fd >= 0) attach(trees[i], path);
        close_fd(&fd);
    }
}

/* Change the root for good. After this no path of the agent can be named. */
static void pivot(const char *root) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 || chdir(root) < 0 || syscall(SYS_pivot_root, ".", ".") < 0 ||
        umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        refuse_errno("pivot_root");
}

static void init_loop(void) __attribute__((noreturn));
static void init_loop(void) {
    sigset_t set;
    syscall(SYS_close_range, 0, ~0u, 0);
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    for (;;) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        sigwaitinfo(&set, NULL);
    }
}

/* The workload's init: makes its world, says under which pid the agent knows it, and then reaps. */
static void work_init(void) {
    int device_trees[DEVICES], etc_trees[ETC_FILES];
    char self[32] = "", path[64];
    struct buffer b = {0};
    if (g.cgroups_ns >= 0 && setns(g.cgroups_ns, CLONE_NEWCGROUP) < 0) refuse_errno("cgroup namespace");
    if (readlink("/proc/self", self, sizeof self - 1) < 0) refuse_errno("/proc/self");
    for (int i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", devices[i]);
        device_trees[i] = clone_tree(path);
    }
    for (int i = 0; i < ETC_FILES; i++) {
        snprintf(path, sizeof path, "/run/etc/%s", etc_files[i]);
        etc_trees[i] = clone_tree(path);
    }
    int boot_id = clone_tree("/run/etc/boot_id");
    umask(0);
    pivot("/run/root");
    need_folder("/proc");
    need_folder("/sys");
    need_folder("/dev");
    mount_dev(device_trees);
    mount_proc(boot_id);
    if (mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) refuse_errno("/sys");
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    set_read_only("/sys");
    mask("/sys/firmware");
    mount_etc(etc_trees);
    umask(022);
    add_text(&b, "pid", self);
    char sign = '+';
    write_all(status_fd, &sign, 1);
    write_all(status_fd, b.data, b.length);
    init_loop();
}

/* --- the verifier's space ------------------------------------------------------------------------------------ */

static void tell_planted(int out, const char *path) { write_all(out, path, strlen(path) + 1); }

/* Names below a folder that ought to be empty; a thousand are enough to know. */
static void tell_contents(int out, int fd, char *path, size_t length, int *left, int depth) {
    char **names = list_folder(fd, 100000);
    for (char **n = names; *n && *left > 0 && length + strlen(*n) + 2 < PATH_MAX; n++) {
        sprintf(path + length, "/%s", *n);
        (*left)--;
        tell_planted(out, path);
        int next = depth < 20 ? openat(fd, *n, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
        if (next >= 0) tell_contents(out, next, path, strlen(path), left, depth + 1);
        close_fd(&next);
        path[length] = 0;
    }
}

/* One component of a verifier's folder in the workload's view: a real folder, and a mount point.
 * As a mount point of its namespace the workload can neither rename nor remove nor replace it, so the path keeps
 * meaning what it means now for as long as the verifier runs. Returns the new mount. */
static int pin_component(int out, int at, const char *name, const char *path, bool last) {
    struct stat st;
    char aside[64];
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(st.st_mode)) {
        tell_planted(out, path);
        snprintf(aside, sizeof aside, ".planted-%lld", (long long)wall_ns());
        if (renameat(at, name, at, aside) < 0) refuse_errno(path);
    }
    if (mkdirat(at, name, 0755) < 0 && errno != EEXIST) refuse_errno(path);
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) refuse_errno(path);
    int tree;
    if (last) {
        char full[PATH_MAX];
        int left = 1000;
        snprintf(full, sizeof full, "%s", path);
        tell_contents(out, fd, full, strlen(full), &left, 0);
        static const char *const options[][2] = {{"mode", "555"}, {"size", "4k"}, {NULL, NULL}};
        tree = new_mount("tmpfs", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, options);
    } else
        tree = (int)syscall(SYS_open_tree, fd, "", AT_EMPTY_PATH | AT_RECURSIVE | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0 || syscall(SYS_move_mount, tree, "", fd, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0) refuse_errno(path);
    close(fd);
    return tree;
}

static void pin_folder(int out, const char *folder) {
    char path[PATH_MAX], name[NAME_MAX + 1];
    int at = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const char *rest = folder + 1;
    while (*rest) {
        size_t length = strcspn(rest, "/");
        if (length == 0 || length > NAME_MAX) refuse("bad_request", "bad folder %s", folder);
        memcpy(name, rest, length);
        name[length] = 0;
        rest += length;
        snprintf(path, sizeof path, "%.*s", (int)(rest - folder), folder);
        rest += *rest == '/';
        int next = pin_component(out, at, name, path, !*rest);
        close(at);
        at = next;
    }
    close(at);
}

/* Runs in the outer pid namespace; the agent takes the mount namespace over while we wait at the end. */
static void help_open_verifier(const struct fields *f, int in, int out) {
    struct span key, value;
    struct buffer none = {0};
    char folder[PATH_MAX], wait;
    int boot_id = -1;
    enter_mounts(WORK);
    umask(0);
    for (int round = 0; round < 2; round++) {
        if (round == 1) {
            if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) refuse_errno("mount namespace");
            boot_id = clone_tree("/proc/sys/kernel/random/boot_id");
            mount_proc(boot_id);
        }
        for (size_t at = 0; next_field(f, &at, &key, &value);) {
            if (!is_key(&key, "folder") || value.length < 2 || value.length >= sizeof folder || value.data[0] != '/') continue;
            memcpy(folder, value.data, value.length);
            folder[value.length] = 0;
            if (round == 0) {
                pin_folder(out, folder);
            } else {
                bool logs = !strcmp(folder, "/logs/verifier"); /* a verifier that runs as a named user writes here */
                if (mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, logs ? "mode=1777" : "mode=755") < 0) refuse_errno(folder);
            }
        }
    }
    close(out);
    read(in, &wait, 1);
    finish('+', &none);
}

/* --- requests under way -------------------------------------------------------------------------------------- */

struct stream { /* from the guest to the host */
    int fd;
    uint32_t credit;
    long drain; /* once the program has ended: how much is still to be sent of what was in the pipe; -1 before */
};

struct op {
    uint32_t id;
    enum kind kind;
    pid_t pid;
    bool exited, cancelled, timed_out, leave_children, terminal, connecting, takes_namespace, in_end, killing, not_gone;
    int status; /* of wait() */
    int in;     /* to the program, helper or socket; -1 when closed */
    struct buffer waiting; /* of the host's bytes, for `in` */
    struct stream out[2];  /* channels 1 and 2 */
    int report;            /* the status pipe */
    char reported[STATUS_MAX + 1];
    size_t reported_length;
    int64_t started, deadline, kill_until;
    int killed;
    char cgroup[48];
};

static struct op *ops[MAX_OPS];
static int op_count;

static struct op *find_op(uint32_t id) {
    for (int i = 0; i < op_count; i++)
        if (ops[i]->id == id) return ops[i];
    return NULL;
}

static struct op *new_op(uint32_t id, enum kind kind) {
    struct op *o = op_count < MAX_OPS ? calloc(1, sizeof *o) : NULL;
    if (o == NULL) {
        send_error(id, "busy", "too many requests at once");
        return NULL;
    }
    o->id = id;
    o->kind = kind;
    o->in = o->report = o->out[0].fd = o->out[1].fd = -1;
    o->out[0].drain = o->out[1].drain = -1;
    o->out[0].credit = o->out[1].credit = WINDOW;
    o->started = now_ms();
    ops[op_count++] = o;
    return o;
}

/* A pipe that others still hold: keep reading it, so that they can go on writing. */
static void leave_pipe(int fd) {
    if (g.left_count == MAX_LEFT) {
        close(g.left[0]);
        memmove(g.left, g.left + 1, (size_t)--g.left_count * sizeof *g.left);
    }
    g.left[g.left_count++] = fd;
}

static void end_op(struct op *o) {
    close_fd(&o->in);
    close_fd(&o->report);
    close_fd(&o->out[0].fd);
    close_fd(&o->out[1].fd);
    buffer_free(&o->waiting);
    for (int i = 0; i < op_count; i++)
        if (ops[i] == o) ops[i] = ops[--op_count];
    free(o);
}

static void fail_op(struct op *o, const char *cause, const char *message) {
    send_error(o->id, cause, message);
    end_op(o);
}

/* --- cgroups ------------------------------------------------------------------------------------------------- */

#define CGROUPS "/run/cgroup"

static void make_cgroup(const char *path) {
    if (mkdir(path, 0755) < 0 && errno != EEXIST) die(path);
}

/* A cgroup namespace rooted at the workload's subtree, so that it sees limits but not our layout. It is made
 * before controllers are handed down there: after that no process may be in the subtree's root. */
static void make_cgroup_namespace(void) {
    int ready[2], hold[2];
    char byte, path[64];
    if (pipe2(ready, O_CLOEXEC) < 0 || pipe2(hold, O_CLOEXEC) < 0) die("pipe");
    pid_t pid = fork();
    if (pid == 0) {
        close(hold[1]);
        if (put_file(CGROUPS "/guest/work/cgroup.procs", "0") && unshare(CLONE_NEWCGROUP) == 0) write(ready[1], "", 1);
        close(ready[1]);
        read(hold[0], &byte, 1);
        _exit(0);
    }
    close(ready[1]);
    close(hold[0]);
    if (pid > 0 && read(ready[0], &byte, 1) == 1) {
        snprintf(path, sizeof path, "%d/ns/cgroup", pid);
        g.cgroups_ns = openat(g.proc, path, O_RDONLY | O_CLOEXEC);
    }
    close(ready[0]);
    close(hold[1]);
    waitpid(pid, NULL, 0);
}

static void set_memory_limits(void) {
    static const char *const groups[] = {"", "/work", "/verify"};
    char path[128], limit[32], pids[32];
    struct sysinfo info;
    sysinfo(&info);
    int64_t total = (int64_t)info.totalram * info.mem_unit, reserve = total / 8;
    /* For the kernel, the agent and its helpers. With less the whole guest runs short before the workload reaches
     * its limit, and instead of one killed process there is a guest that does nothing but re-read its programs. */
    if (reserve < 48ll << 20) reserve = 48ll << 20;
    if (reserve > 128ll << 20) reserve = 128ll << 20;
    g.memory_limit = total - reserve;
    int64_t processes = g.memory_limit / (256 * 1024);
    snprintf(limit, sizeof limit, "%lld", (long long)g.memory_limit);
    snprintf(pids, sizeof pids, "%lld", (long long)(processes > 4096 ? 4096 : processes < 128 ? 128 : processes));
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, CGROUPS "/guest%s/memory.max", groups[i]);
        put_file(path, limit);
        snprintf(path, sizeof path, CGROUPS "/guest%s/pids.max", groups[i]);
        if (i > 0) put_file(path, pids);
    }
}

static void make_cgroups(void) {
    make_cgroup(CGROUPS);
    if (mount("cgroup2", CGROUPS, "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) die("cgroup2");
    make_cgroup(CGROUPS "/guest");
    make_cgroup(CGROUPS "/guest/work");
    make_cgroup(CGROUPS "/guest/verify");
    put_file(CGROUPS "/cgroup.subtree_control", "+memory +pids +cpu");
    put_file(CGROUPS "/guest/cgroup.subtree_control", "+memory +pids +cpu");
    make_cgroup_namespace();
    /* each program gets its share of the processor: a fork bomb is one program among others */
    put_file(CGROUPS "/guest/work/cgroup.subtree_control", "+memory +pids +cpu");
    put_file(CGROUPS "/guest/verify/cgroup.subtree_control", "+memory +pids +cpu");
    set_memory_limits();
}

/* Cgroups of programs that left others behind go as soon as they are empty; a few are tried each time. */
static void sweep_cgroups(void) {
    for (int i = 0; i < g.stale_count && i < 8; i++)
        if (rmdir(g.stale[i]) == 0 || errno == ENOENT) memmove(g.stale[i], g.stale[--g.stale_count], sizeof g.stale[0]);
}

static void drop_cgroup(const char *path) {
    if (!*path || rmdir(path) == 0) return;
    if (g.stale_count < 64) snprintf(g.stale[g.stale_count++], sizeof g.stale[0], "%s", path);
}

static int open_cgroup(struct op *o, enum space space) {
    sweep_cgroups();
    snprintf(o->cgroup, sizeof o->cgroup, CGROUPS "/guest/%s/e%d", space == VERIFY ? "verify" : "work", ++g.exec_count);
    if (mkdir(o->cgroup, 0755) < 0) return -1;
    return open(o->cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static int64_t cgroup_number(const char *cgroup, const char *file) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", cgroup, file);
    return read_number(path);
}

static int64_t cgroup_keyed(const char *cgroup, const char *file, const char *key) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", cgroup, file);
    return read_keyed(path, key);
}

static int count_processes(const char *cgroup) {
    char path[128], text[4096];
    int count = 0;
    ssize_t n;
    snprintf(path, sizeof path, "%s/cgroup.procs", cgroup);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && (n = read(fd, text, sizeof text)) > 0)
        for (ssize_t i = 0; i < n; i++) count += text[i] == '\n';
    close_fd(&fd);
    return count;
}

/* Begin to kill everything of a program; the loop sees to the end of it. */
static void start_killing(struct op *o) {
    char path[128];
    if (o->killing) return;
    o->killing = true;
    o->kill_until = now_ms() + KILL_TIMEOUT_MS;
    o->deadline = 0;
    if (g.plain) {
        kill(-o->pid, SIGKILL);
        return;
    }
    int count = count_processes(o->cgroup);
    o->killed = count > 0 && !o->exited ? count - 1 : count;
    snprintf(path, sizeof path, "%s/cgroup.kill", o->cgroup);
    put_file(path, "1");
}

static bool killing_done(struct op *o) {
    if (!o->killing) return true;
    if (g.plain || cgroup_keyed(o->cgroup, "cgroup.events", "populated") == 0) return o->exited;
    if (now_ms() < o->kill_until) return false;
    o->not_gone = true;
    return true;
}

/* --- starting children --------------------------------------------------------------------------------------- */

static bool make_pipe(int *ours, int *theirs, bool we_read) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0) return false;
    *ours = ends[we_read ? 0 : 1];
    *theirs = ends[we_read ? 1 : 0];
    fcntl(*ours, F_SETFL, O_NONBLOCK);
    return true;
}

static bool open_terminal(struct op *o, struct program *p, int rows, int columns) {
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    int unlock = 0;
    int master = g.plain ? open("/dev/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC)
                         : openat(g.work_pts, "ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) < 0 || ioctl(master, TIOCSWINSZ, &size) < 0) {
        close_fd(&master);
        return false;
    }
    p->in = p->out = p->err = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    o->out[0].fd = master;
    o->in = fcntl(master, F_DUPFD_CLOEXEC, 3);
    o->terminal = p->terminal = true;
    return p->in >= 0;
}

static bool parse_program(const struct fields *f, struct program *p) {
    struct span key, value;
    char space[8];
    int argc = 0;
    memset(p, 0, sizeof *p);
    p->in = p->out = p->err = -1;
    p->argv = calloc(MAX_ARGUMENTS + 1, sizeof *p->argv);
    p->envp = calloc(MAX_ARGUMENTS + 8, sizeof *p->envp); /* room for default_env */
    if (p->argv == NULL || p->envp == NULL) return false;
    for (size_t at = 0; next_field(f, &at, &key, &value);) {
        bool argument = is_key(&key, "arg");
        if (!argument && !is_key(&key, "env")) continue;
        if (argc == MAX_ARGUMENTS || p->envc == MAX_ARGUMENTS || memchr(value.data, 0, value.length)) return false;
        char *text = malloc(value.length + 1);
        if (text == NULL) return false;
        memcpy(text, value.data, value.length);
        text[value.length] = 0;
        if (argument) p->argv[argc++] = text;
        else p->envp[p->envc++] = text;
    }
    if (!text_field(f, "cwd", p->cwd, sizeof p->cwd)) snprintf(p->cwd, sizeof p->cwd, "%s", g.workdir);
    p->make_cwd = strcmp(p->cwd, g.workdir) == 0;
    text_field(f, "user", p->user, sizeof p->user);
    text_field(f, "space", space, sizeof space);
    p->space = !strcmp(space, "verify") ? VERIFY : WORK;
    return argc > 0;
}

static void free_program(struct program *p) {
    for (char **a = p->argv; a && *a; a++) free(*a);
    for (int i = 0; p->envp && i < p->envc; i++) free(p->envp[i]);
    free(p->argv);
    free(p->envp);
}

/* fork() with a status pipe; 0 in the child. */
static pid_t start_child(struct op *o, int pids, int cgroup) {
    int report;
    if (!make_pipe(&o->report, &report, true)) return -1;
    o->pid = fork_in(pids, cgroup);
    if (o->pid == 0) {
        status_fd = report;
        return 0;
    }
    int error = errno;
    close(report);
    errno = error;
    return o->pid;
}

static bool connect_streams(struct op *o, struct program *p, const struct fields *f) {
    char terminal[32];
    if (text_field(f, "terminal", terminal, sizeof terminal)) {
        int rows = 24, columns = 80;
        sscanf(terminal, "%d %d", &rows, &columns);
        return open_terminal(o, p, rows, columns);
    }
    if (number_field(f, "stdin", 0) && !make_pipe(&o->in, &p->in, false)) return false;
    return make_pipe(&o->out[0].fd, &p->out, true) && make_pipe(&o->out[1].fd, &p->err, true);
}

static void begin_exec(uint32_t id, const struct fields *f) {
    struct program p;
    struct op *o = new_op(id, EXEC);
    if (o == NULL) return;
    if (!parse_program(f, &p)) {
        fail_op(o, "bad_request", "bad arguments");
    } else if (p.space == VERIFY && !g.plain && g.verify_mounts < 0) {
        fail_op(o, "no_verifier_space", "there is no verifier space yet");
    } else if (!connect_streams(o, &p, f)) {
        fail_op(o, "limit", "no more pipes or terminals in the guest");
    } else {
        int64_t timeout = number_field(f, "timeout_ms", 0);
        int cgroup = g.plain ? -1 : open_cgroup(o, p.space);
        o->leave_children = number_field(f, "leave", 1);
        o->deadline = timeout > 0 ? o->started + timeout : 0;
        if (start_child(o, g.plain ? -1 : p.space == VERIFY ? g.outer_pids : g.work_pids, cgroup) == 0) run_program(&p);
        close_fd(&cgroup);
        if (o->pid < 0) {
            drop_cgroup(o->cgroup);
            fail_op(o, errno == EAGAIN ? "limit" : "guest_io", errno == EAGAIN ? "too many processes in the guest" : strerror(errno));
        }
    }
    if (p.in >= 0) close(p.in);
    if (p.out >= 0 && p.out != p.in) close(p.out);
    if (p.err >= 0 && p.err != p.in) close(p.err);
    free_program(&p);
}

static void help_freeze(const char *value) {
    struct buffer none = {0};
    if (g.plain) finish('+', &none);
    if (!put_file(CGROUPS "/guest/work/cgroup.freeze", value)) refuse_errno("freezer");
    for (int i = 0; i < 5000; i++) {
        if (read_keyed(CGROUPS "/guest/work/cgroup.events", "frozen") == *value - '0') finish('+', &none);
        usleep(1000);
    }
    refuse("not_frozen", "the workload did not come to a stand within 5 s");
}

static void help_sync(void) {
    struct buffer none = {0};
    int fd = open("/run/work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (g.plain) sync();
    else if (fd < 0 || syncfs(fd) < 0) refuse_errno("sync");
    finish('+', &none);
}

static const char *const helpers[] = {"put", "get", "remove", "changes", "freeze", "thaw", "sync", "open_verifier"};
enum { HELPERS = sizeof helpers / sizeof *helpers };

static void run_helper(const char *name, const struct fields *f, int in, int out) {
    default_signals();
    prctl(PR_SET_NAME, "helper", 0, 0, 0);
    /* short of memory a helper goes first: that is one failed request, not a lost workload */
    set_oom_score("1000");
    if (!strcmp(name, "put")) help_put(f, in);
    if (!strcmp(name, "get")) help_get(f, out);
    if (!strcmp(name, "remove")) help_remove(f);
    if (!strcmp(name, "changes")) help_changes(f, out);
    if (!strcmp(name, "freeze")) help_freeze("1");
    if (!strcmp(name, "thaw")) help_freeze("0");
    if (!strcmp(name, "sync")) help_sync();
    if (!strcmp(name, "open_verifier")) help_open_verifier(f, in, out);
    _exit(1);
}

static bool space_exists(const struct fields *f) {
    char space[8];
    return g.plain || !text_field(f, "space", space, sizeof space) || strcmp(space, "verify") != 0 || g.verify_mounts >= 0;
}

static void begin_helper(uint32_t id, const char *name, const struct fields *f) {
    int in = -1, out = -1;
    struct op *o = new_op(id, HELPER);
    if (o == NULL) return;
    o->takes_namespace = !strcmp(name, "open_verifier");
    if (!space_exists(f)) {
        fail_op(o, "no_verifier_space", "there is no verifier space yet");
        return;
    }
    if (o->takes_namespace && (g.verify_mounts >= 0 || g.plain)) {
        fail_op(o, "wrong_state", "the verifier space is open already");
        return;
    }
    if (!make_pipe(&o->in, &in, false) || !make_pipe(&o->out[0].fd, &out, true)) {
        fail_op(o, "limit", "no more pipes in the guest");
    } else if (start_child(o, o->takes_namespace ? g.outer_pids : -1, -1) == 0) {
        close_fd(&o->in); /* or it would never see the end of its own input */
        close_fd(&o->out[0].fd);
        run_helper(name, f, in, out);
    } else if (o->pid < 0)
        fail_op(o, "guest_io", strerror(errno));
    close_fd(&in);
    close_fd(&out);
}

static void begin_forward(uint32_t id, const struct fields *f) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_port = htons((uint16_t)number_field(f, "port", 0))};
    struct op *o = new_op(id, FORWARD);
    if (o == NULL) return;
    o->in = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (o->in < 0 || (connect(o->in, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS))
        fail_op(o, "connection_refused", strerror(errno));
    else
        o->connecting = true;
}

/* --- set-up, states ------------------------------------------------------------------------------------------ */

static void reply_clock(uint32_t id, const struct fields *f) {
    struct span nonce;
    struct buffer b = {0};
    int64_t time = number_field(f, "time_ns", 0);
    struct timespec t = {time / 1000000000, time % 1000000000};
    if (time > 0 && !g.plain && clock_settime(CLOCK_REALTIME, &t) < 0) {
        send_error(id, "clock", strerror(errno));
        return;
    }
    if (find_field(f, "nonce", &nonce)) add_field(&b, "nonce", nonce.data, nonce.length);
    add_number(&b, "time_ns", wall_ns());
    send_fields(REPLY, id, &b);
}

/* Fresh entropy that counts, and a reseed at once: writing to /dev/urandom alone does not separate two clones. */
static bool stir(const struct span *entropy) {
    uint32_t pool[2 + 128]; /* struct rand_pool_info: bits, bytes, data */
    if (entropy->length < 64 || entropy->length > 512) return false;
    pool[0] = (uint32_t)entropy->length * 8;
    pool[1] = (uint32_t)entropy->length;
    memcpy(pool + 2, entropy->data, entropy->length);
    return g.plain || (ioctl(g.urandom, RNDADDENTROPY, pool) == 0 && ioctl(g.urandom, RNDRESEEDCRNG) == 0);
}

static void do_clone(uint32_t id, const struct fields *f) {
    struct span entropy;
    if (!find_field(f, "entropy", &entropy) || !stir(&entropy)) {
        send_error(id, "entropy", "the random number generator cannot be seeded");
        return;
    }
    text_field(f, "hostname", g.hostname, sizeof g.hostname);
    text_field(f, "machine_id", g.machine_id, sizeof g.machine_id);
    text_field(f, "boot_id", g.boot_id, sizeof g.boot_id);
    if (!g.plain) sethostname(g.hostname, strlen(g.hostname));
    g.state = CONFIRMED;
    reply_clock(id, f);
}

/* Disks are told apart by the serial number that the host gives them. */
static bool find_disk(const char *serial, char *path, size_t size) {
    char name[64], text[32];
    for (char letter = 'a'; letter <= 'f'; letter++) {
        snprintf(name, sizeof name, "/sys/block/vd%c/serial", letter);
        if (read_file(name, text, sizeof text) <= 0) continue;
        text[strcspn(text, "\n")] = 0;
        if (strcmp(text, serial) != 0) continue;
        snprintf(path, size, "/dev/vd%c", letter);
        /* what the template read of its blank disk (partition tables) must not be believed now */
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) ioctl(fd, BLKFLSBUF, 0);
        close_fd(&fd);
        return true;
    }
    return false;
}

static void mount_disks(void) {
    char base[16], work[16];
    if (!find_disk("base", base, sizeof base) || !find_disk("work", work, sizeof work)) refuse("no_disk", "a disk is missing");
    if (mount(base, "/run/base", "squashfs", MS_RDONLY | MS_NODEV, NULL) < 0 && mount(base, "/run/base", "erofs", MS_RDONLY | MS_NODEV, NULL) < 0)
        refuse("bad_base_disk", "the image's disk cannot be mounted: %s", strerror(errno));
    if (mount(work, "/run/work", "ext4", MS_NODEV | MS_NOATIME, NULL) < 0)
        refuse("bad_work_disk", "the writable disk cannot be mounted: %s", strerror(errno));
    mkdir("/run/work/upper", 0755);
    mkdir("/run/work/work", 0755);
    if (mount("overlay", "/run/root", "overlay", MS_NODEV, "lowerdir=/run/base,upperdir=/run/work/upper,workdir=/run/work/work") < 0)
        refuse("bad_work_disk", "the overlay cannot be mounted: %s", strerror(errno));
}

/* The upper folder becomes the root of the image: it must look like the image's root, once. */
static void copy_root_attributes(void) {
    struct stat st;
    if (stat("/run/base", &st) < 0 || access("/run/work/.dayfly-set-up", F_OK) == 0) return;
    if (chown("/run/work/upper", st.st_uid, st.st_gid) == 0) chmod("/run/work/upper", st.st_mode & 07777);
    put_file("/run/work/.dayfly-set-up", "");
}

/* In a child within the outer pid namespace, so that its sibling, the new init, is one level below it. */
static void spawn_work_init(void) {
    struct clone_args args = {.flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_PARENT}; /* our own exit signal is inherited */
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    if (pid < 0) refuse_errno("work init");
    if (pid == 0) work_init();
    _exit(0);
}

/* Wait for one report of a child, in the set-up only: the host waits for the same thing. */
static bool await_report(int fd, char *text, size_t *length) {
    int64_t until = now_ms() + ACK_TIMEOUT_MS;
    *length = 0;
    for (;;) {
        struct pollfd p = {fd, POLLIN, 0};
        ssize_t n;
        if (poll(&p, 1, (int)(until - now_ms() > 0 ? until - now_ms() : 0)) <= 0) return false;
        if ((n = read(fd, text + *length, STATUS_MAX - *length)) <= 0) return *length > 0;
        *length += (size_t)n;
    }
}

static void open_work_namespaces(const char *pid) {
    char path[64];
    snprintf(path, sizeof path, "%s/ns/mnt", pid);
    g.work_mounts = openat(g.proc, path, O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "%s/ns/pid", pid);
    g.work_pids = openat(g.proc, path, O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "%s/root/dev/pts", pid);
    g.work_pts = openat(g.proc, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (g.work_mounts < 0 || g.work_pids < 0 || g.work_pts < 0) die("namespaces of the workload");
}

static pid_t fork_reporting(int pids, int *report) {
    int theirs;
    if (!make_pipe(report, &theirs, true)) return -1;
    pid_t pid = fork_in(pids, -1);
    if (pid == 0) {
        status_fd = theirs;
        default_signals();
        return 0;
    }
    close(theirs);
    return pid;
}

static void send_reported(uint32_t id, const char *text, size_t length) {
    if (length == 0) send_error(id, "guest_io", "a helper in the guest died");
    else send_frame(text[0] == '+' ? REPLY : ERROR, 0, id, text + 1, length - 1);
}

static void add_sizes(struct buffer *b) {
    struct statvfs fs = {0};
    struct sysinfo info;
    sysinfo(&info);
    if (!g.plain) statvfs("/run/work", &fs);
    add_number(b, "memory_limit", g.memory_limit);
    add_number(b, "memory_total", (int64_t)info.totalram * info.mem_unit);
    add_number(b, "disk_size", (int64_t)(fs.f_blocks * fs.f_frsize));
    add_number(b, "disk_free", (int64_t)(fs.f_bavail * fs.f_frsize));
}

static void do_setup(uint32_t id, const struct fields *f) {
    char text[STATUS_MAX + 1], pid[32];
    size_t length = 0;
    int report = -1;
    struct buffer b = {0}, none = {0};
    if (!text_field(f, "workdir", g.workdir, sizeof g.workdir) || g.workdir[0] != '/') strcpy(g.workdir, "/");
    if (!g.plain) {
        /* mounting in a child: an image that the kernel chokes on is an answer, not the end of the agent */
        pid_t child = fork_reporting(-1, &report);
        if (child == 0) {
            write_etc_files();
            mount_disks();
            copy_root_attributes();
            finish('+', &none);
        }
        if (!await_report(report, text, &length) || text[0] != '+') goto failed;
        close_fd(&report);
        if (fork_reporting(g.outer_pids, &report) == 0) spawn_work_init();
        if (!await_report(report, text, &length) || text[0] != '+') goto failed;
        close_fd(&report);
        struct fields told = {(uint8_t *)text + 1, length - 1};
        if (!text_field(&told, "pid", pid, sizeof pid)) goto failed;
        open_work_namespaces(pid);
        for (int i = 0; i < ETC_FILES; i++) {
            snprintf(text, sizeof text, "/etc/%s", etc_files[i]);
            note_made(text);
        }
        note_made("/proc");
        note_made("/sys");
        note_made("/dev");
    }
    g.state = READY;
    add_sizes(&b);
    send_fields(REPLY, id, &b);
    return;
failed:
    close_fd(&report);
    send_reported(id, text, length);
}

static void reply_stats(uint32_t id) {
    struct buffer b = {0};
    const char *work = CGROUPS "/guest/work";
    int64_t peak = cgroup_number(work, "memory.peak"), now = cgroup_number(work, "memory.current");
    if (now > g.memory_seen) g.memory_seen = now; /* kernels before 5.19 keep no peak: the largest we saw */
    add_number(&b, "memory_peak", peak > g.memory_seen ? peak : g.memory_seen);
    add_number(&b, "oom_kills", cgroup_keyed(work, "memory.events", "oom_kill"));
    add_number(&b, "pids", cgroup_number(work, "pids.current"));
    add_number(&b, "time_ns", wall_ns());
    add_sizes(&b);
    send_fields(REPLY, id, &b);
}

static void reply_hello(uint32_t id) {
    static const char *const states[] = {"waiting", "confirmed", "ready", "stopping"};
    struct buffer b = {0};
    add_text(&b, "version", VERSION);
    add_text(&b, "state", states[g.state]);
    add_number(&b, "window", WINDOW);
    send_fields(REPLY, id, &b);
}

static bool flush_out(void);

/* Everything of the workload ends, the disk is made clean, the host is told, and then the power goes. */
static void do_poweroff(uint32_t id) {
    g.state = STOPPING;
    if (!g.plain) {
        put_file(CGROUPS "/guest/cgroup.kill", "1");
        close_fd(&g.work_mounts);
        close_fd(&g.verify_mounts);
        close_fd(&g.work_pts);
        kill(-1, SIGKILL); /* all but us: both inits and what is in their namespaces */
        for (int64_t until = now_ms() + 5000; now_ms() < until;) {
            pid_t pid = waitpid(-1, NULL, WNOHANG);
            if (pid < 0) break;
            if (pid == 0) usleep(1000);
        }
        if (umount2("/run/root", 0) < 0 || umount2("/run/work", 0) < 0) {
            say("the disk is still in use: %s", strerror(errno));
            mount(NULL, "/run/work", NULL, MS_REMOUNT | MS_RDONLY, NULL);
        }
        sync();
    }
    send_ok(id);
    for (int64_t until = now_ms() + 1000; g.out.length > 0 && now_ms() < until && flush_out();) usleep(1000);
    usleep(20000); /* the port gives no sign when the host has taken the last bytes */
    power_off();
}

/* --- frames from the host ------------------------------------------------------------------------------------ */

static bool is_allowed(const char *op) {
    if (!strcmp(op, "hello")) return true;
    if (!strcmp(op, "clone")) return g.state == WAITING; /* once: a second one is not for this guest */
    if (!strcmp(op, "setup")) return g.state == CONFIRMED;
    if (!strcmp(op, "clock") || !strcmp(op, "poweroff")) return g.state != WAITING;
    return g.state == READY;
}

static void do_request(uint32_t id, const struct fields *f) {
    char op[32];
    text_field(f, "op", op, sizeof op);
    if (find_op(id) != NULL) {
        errno = EPROTO;
        die("a request id is in use");
    }
    if (!is_allowed(op)) {
        send_error(id, "wrong_state", "this request is not allowed now");
        return;
    }
    if (!strcmp(op, "hello")) reply_hello(id);
    else if (!strcmp(op, "clone")) do_clone(id, f);
    else if (!strcmp(op, "clock")) reply_clock(id, f);
    else if (!strcmp(op, "setup")) do_setup(id, f);
    else if (!strcmp(op, "exec")) begin_exec(id, f);
    else if (!strcmp(op, "forward")) begin_forward(id, f);
    else if (!strcmp(op, "stats")) reply_stats(id);
    else if (!strcmp(op, "poweroff")) do_poweroff(id);
    else {
        for (int i = 0; i < HELPERS; i++)
            if (!strcmp(op, helpers[i])) {
                begin_helper(id, op, f);
                return;
            }
        send_error(id, "unknown_request", "this agent does not know the request");
    }
}

static void collect_request(uint32_t id, unsigned flags, const uint8_t *payload, size_t length) {
    if ((g.request_open && g.request_id != id) || g.request.length + length > MAX_REQUEST) {
        errno = EPROTO;
        die("a request out of order or too long");
    }
    g.request_id = id;
    g.request_open = true;
    buffer_add(&g.request, payload, length);
    if (flags & MORE) return;
    struct fields f = {g.request.data + g.request.start, g.request.length};
    g.request_open = false;
    do_request(id, &f);
    if (g.request.capacity > MAX_PAYLOAD) buffer_free(&g.request);
    else buffer_take(&g.request, g.request.length);
}

static void grant(uint32_t id, size_t length) {
    uint8_t credit[4];
    set_le(credit, length, 4);
    send_frame(CREDIT, 0, id, credit, 4);
}

/* Give the program as much of the waiting input as it takes now. */
static void feed(struct op *o) {
    while (o->in >= 0 && !o->connecting && o->waiting.length > 0) {
        size_t length = o->waiting.length < CHUNK ? o->waiting.length : CHUNK;
        ssize_t n = o->kind == FORWARD ? send(o->in, o->waiting.data + o->waiting.start, length, MSG_NOSIGNAL)
                                       : write(o->in, o->waiting.data + o->waiting.start, length);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n < 0) { /* it closed its input: what comes is dropped */
            grant(o->id, o->waiting.length);
            buffer_free(&o->waiting);
            if (o->kind != FORWARD) close_fd(&o->in);
            return;
        }
        buffer_take(&o->waiting, (size_t)n);
        grant(o->id, (size_t)n);
    }
    if (o->in_end && o->waiting.length == 0 && o->in >= 0 && !o->connecting) {
        o->in_end = false;
        if (o->kind == FORWARD) shutdown(o->in, SHUT_WR);
        else if (o->terminal) write(o->in, "\x04", 1);
        else close_fd(&o->in);
    }
}

static void take_data(uint32_t id, const uint8_t *payload, size_t length) {
    struct op *o = find_op(id);
    if (o == NULL) return; /* it ended while this was under way */
    if (o->waiting.length + length > WINDOW) {
        errno = EPROTO;
        die("more data than the window");
    }
    if (o->in < 0) {
        grant(id, length);
        return;
    }
    buffer_add(&o->waiting, payload, length);
    feed(o);
}

static void cancel_op(struct op *o) {
    o->cancelled = true;
    if (o->kind == FORWARD) {
        fail_op(o, "cancelled", "cancelled");
    } else if (o->kind == HELPER) {
        kill(o->pid, SIGKILL);
    } else
        start_killing(o);
}

static void do_frame(unsigned type, uint8_t channel, unsigned flags, uint32_t id, const uint8_t *payload, size_t length) {
    struct op *o;
    switch (type) {
    case REQUEST: collect_request(id, flags, payload, length); break;
    case DATA: take_data(id, payload, length); break;
    case END:
        if ((o = find_op(id)) != NULL) {
            o->in_end = true;
            feed(o);
        }
        break;
    case CREDIT:
        if ((o = find_op(id)) != NULL && length == 4 && (channel == 1 || channel == 2)) o->out[channel - 1].credit += get_u32(payload);
        break;
    case CANCEL:
        if ((o = find_op(id)) != NULL && !o->cancelled) cancel_op(o);
        break;
    case PING: send_frame(PONG, 0, id, payload, length); break;
    default: errno = EPROTO; die("unknown frame");
    }
}

static void do_frames(void) {
    while (g.in.length >= HEADER) {
        const uint8_t *p = g.in.data + g.in.start;
        size_t length = get_u32(p);
        if (length > MAX_PAYLOAD) {
            errno = EPROTO;
            die("a frame is too long");
        }
        if (g.in.length < HEADER + length) return;
        do_frame(p[4], p[5], p[6], get_u32(p + 8), p + HEADER, length);
        buffer_take(&g.in, HEADER + length);
    }
}

/* --- the loop ------------------------------------------------------------------------------------------------ */

static bool flush_out(void) {
    while (g.out.length > 0) {
        ssize_t n = write(g.port, g.out.data + g.out.start, g.out.length < CHUNK ? g.out.length : CHUNK);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return true;
        if (n <= 0) return g.plain ? false : true; /* for a port, `host_gone` decides */
        buffer_take(&g.out, (size_t)n);
    }
    return true;
}

/* Send what a pipe has. Returns false when the stream has come to its end. */
static bool pump(struct op *o, int channel) {
    static uint8_t data[CHUNK];
    struct stream *s = &o->out[channel - 1];
    while (s->fd >= 0 && s->credit > 0 && g.out.length < MAX_OUT / 2 && s->drain != 0) {
        size_t want = s->credit < CHUNK ? s->credit : CHUNK;
        if (s->drain > 0 && (size_t)s->drain < want) want = (size_t)s->drain;
        ssize_t n = read(s->fd, data, want);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return true;
        if (n <= 0) return false; /* a terminal whose other side is closed says EIO */
        s->credit -= (uint32_t)n;
        if (s->drain > 0) s->drain -= n;
        if (!o->cancelled) send_frame(DATA, (uint8_t)channel, o->id, data, (size_t)n);
    }
    return s->drain != 0;
}

/* The main process has ended: only what is in the pipes now still belongs to the result. */
static void start_draining(struct op *o) {
    for (int i = 0; i < 2; i++) {
        int waiting = 0;
        if (o->out[i].fd < 0 || o->out[i].drain >= 0) continue;
        if (o->cancelled || ioctl(o->out[i].fd, FIONREAD, &waiting) < 0) waiting = 0;
        o->out[i].drain = waiting;
    }
}

static bool is_held(int fd) {
    struct pollfd p = {fd, 0, 0};
    return fd >= 0 && poll(&p, 1, 0) >= 0 && !(p.revents & POLLHUP);
}

static void reply_exec(struct op *o) {
    struct buffer b = {0};
    bool held = false;
    for (int i = 0; i < 2; i++) {
        if (!is_held(o->out[i].fd)) continue;
        held = true;
        leave_pipe(o->out[i].fd);
        o->out[i].fd = -1;
    }
    if (WIFSIGNALED(o->status)) add_number(&b, "signal", WTERMSIG(o->status));
    else add_number(&b, "code", WEXITSTATUS(o->status));
    add_number(&b, "writers", held);
    add_number(&b, "timed_out", o->timed_out);
    add_number(&b, "killed", o->killed);
    add_number(&b, "oom", o->cgroup[0] ? cgroup_keyed(o->cgroup, "memory.events", "oom_kill") : 0);
    add_number(&b, "ms", now_ms() - o->started);
    send_fields(REPLY, o->id, &b);
    int64_t now = g.plain ? 0 : cgroup_number(CGROUPS "/guest/work", "memory.current");
    if (now > g.memory_seen) g.memory_seen = now;
    drop_cgroup(o->cgroup);
    end_op(o);
}

static void step_exec(struct op *o) {
    if (o->deadline && now_ms() >= o->deadline && !o->exited) {
        o->timed_out = true;
        start_killing(o);
    }
    bool drained[2];
    for (int i = 0; i < 2; i++) {
        drained[i] = o->out[i].fd < 0 || !pump(o, i + 1);
        if (drained[i] && !o->exited && !o->terminal) close_fd(&o->out[i].fd); /* it closed its output and lives on */
    }
    if (!o->exited) return;
    if (o->reported_length > 0) { /* it never started */
        drop_cgroup(o->cgroup);
        send_reported(o->id, o->reported, o->reported_length);
        end_op(o);
        return;
    }
    if (!o->leave_children || o->cancelled) start_killing(o);
    if (!killing_done(o)) return;
    if (o->out[0].drain < 0 && o->out[1].drain < 0) {
        start_draining(o);
        drained[0] = o->out[0].fd < 0 || !pump(o, 1);
        drained[1] = o->out[1].fd < 0 || !pump(o, 2);
    }
    if (!drained[0] || !drained[1]) return;
    if (o->not_gone) {
        drop_cgroup(o->cgroup);
        fail_op(o, "not_gone", "processes are still there 5 s after they were killed");
    } else if (o->cancelled) {
        drop_cgroup(o->cgroup);
        fail_op(o, "cancelled", "cancelled");
    } else
        reply_exec(o);
}

/* The verifier's mount namespace is made by a helper and kept by us. */
static void take_namespace(struct op *o) {
    char path[64];
    snprintf(path, sizeof path, "%d/ns/mnt", o->pid);
    if (o->reported_length == 0 && !o->exited) g.verify_mounts = openat(g.proc, path, O_RDONLY | O_CLOEXEC);
    o->takes_namespace = false;
    close_fd(&o->in);
}

static void step_helper(struct op *o) {
    if (o->out[0].fd >= 0 && !pump(o, 1)) close_fd(&o->out[0].fd);
    if (o->takes_namespace && (o->out[0].fd < 0 || o->exited)) take_namespace(o);
    if (!o->exited || o->report >= 0 || (o->out[0].fd >= 0 && !o->cancelled)) return;
    if (o->cancelled) send_error(o->id, "cancelled", "cancelled");
    else send_reported(o->id, o->reported, o->reported_length);
    end_op(o);
}

static void step_forward(struct op *o) {
    if (o->connecting) {
        struct pollfd p = {o->in, POLLOUT, 0};
        int error = 0;
        socklen_t size = sizeof error;
        if (poll(&p, 1, 0) <= 0) return;
        getsockopt(o->in, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) {
            fail_op(o, "connection_refused", strerror(error));
            return;
        }
        o->connecting = false;
        o->out[0].fd = fcntl(o->in, F_DUPFD_CLOEXEC, 3);
        send_frame(STARTED, 0, o->id, NULL, 0);
        feed(o);
    }
    if (o->out[0].fd >= 0 && !pump(o, 1)) {
        close_fd(&o->out[0].fd);
        send_frame(END, 1, o->id, NULL, 0);
        send_ok(o->id); /* the service has said everything: what the host still sends has no reader */
        end_op(o);
    }
}

static void read_report(struct op *o) {
    while (o->report >= 0) {
        ssize_t n = read(o->report, o->reported + o->reported_length, STATUS_MAX - o->reported_length);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) close_fd(&o->report);
        else o->reported_length += (size_t)n;
    }
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < op_count; i++)
            if (ops[i]->pid == pid && ops[i]->kind != FORWARD) {
                ops[i]->exited = true;
                ops[i]->status = status;
                read_report(ops[i]);
            }
}

static void drop_left(void) {
    static uint8_t data[CHUNK];
    for (int i = 0; i < g.left_count; i++) {
        ssize_t n = read(g.left[i], data, sizeof data);
        if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) continue;
        close(g.left[i]);
        g.left[i--] = g.left[--g.left_count];
    }
}

/* A guest whose host is gone must not go on. At boot the port may not be connected yet. */
static void watch_host(bool hup) {
    if (!hup) {
        g.host_seen = true;
        g.host_gone_since = 0;
    } else if (g.host_seen) {
        if (g.plain) _exit(0);
        if (g.host_gone_since == 0) g.host_gone_since = now_ms();
        if (now_ms() - g.host_gone_since > HOST_GONE_MS) {
            say("the host is gone");
            power_off();
        }
    }
}

static void read_port(void) {
    static uint8_t data[MAX_PAYLOAD];
    for (int i = 0; i < 64; i++) {
        ssize_t n = read(g.port, data, sizeof data);
        if (n == 0 && g.plain) _exit(0);
        if (n <= 0) break;
        buffer_add(&g.in, data, (size_t)n);
        do_frames();
    }
}

static int poll_timeout(void) {
    int64_t timeout = g.host_gone_since || !g.host_seen ? 20 : -1, now = now_ms();
    for (int i = 0; i < op_count; i++) {
        if (ops[i]->killing && ops[i]->exited) return 2;
        if (!ops[i]->deadline) continue;
        int64_t left = ops[i]->deadline > now ? ops[i]->deadline - now : 0;
        if (timeout < 0 || left < timeout) timeout = left;
    }
    return timeout > 1000000 ? 1000000 : (int)timeout;
}

static struct pollfd polled[2 + MAX_OPS * 4 + MAX_LEFT];

static int fill_polled(void) {
    int n = 0;
    bool may_read = g.out.length < MAX_OUT / 2;
    polled[n++] = (struct pollfd){g.port, (short)(POLLIN | (g.out.length ? POLLOUT : 0)), 0};
    polled[n++] = (struct pollfd){g.signals, POLLIN, 0};
    for (int i = 0; i < op_count; i++) {
        struct op *o = ops[i];
        for (int c = 0; c < 2; c++)
            if (o->out[c].fd >= 0 && o->out[c].credit > 0 && may_read && !(o->exited && o->kind == EXEC && o->killing && !killing_done(o)))
                polled[n++] = (struct pollfd){o->out[c].fd, POLLIN, 0};
        if (o->in >= 0 && (o->waiting.length > 0 || o->connecting)) polled[n++] = (struct pollfd){o->in, POLLOUT, 0};
        if (o->report >= 0) polled[n++] = (struct pollfd){o->report, POLLIN, 0};
    }
    for (int i = 0; i < g.left_count; i++) polled[n++] = (struct pollfd){g.left[i], POLLIN, 0};
    return n;
}

static void turn(void) {
    struct signalfd_siginfo info;
    int n = fill_polled();
    if (g.host_gone_since || !g.host_seen) { /* HUP would wake us for ever */
        usleep(10000);
        poll(polled, (nfds_t)n, 0);
    } else
        poll(polled, (nfds_t)n, poll_timeout());
    watch_host(polled[0].revents & POLLHUP);
    while (read(g.signals, &info, sizeof info) > 0) {}
    reap();
    read_port();
    for (int i = op_count - 1; i >= 0; i--) {
        struct op *o = ops[i];
        read_report(o);
        feed(o);
        if (o->kind == EXEC) step_exec(o);
        else if (o->kind == HELPER) step_helper(o);
        else step_forward(o);
        if (i > op_count) i = op_count;
    }
    drop_left();
    if (!flush_out()) _exit(0);
}

/* --- boot ---------------------------------------------------------------------------------------------------- */

static void load_modules(void) {
    struct dirent **names;
    int count = scandir("/modules", &names, NULL, alphasort);
    for (int i = 0; i < count; i++) {
        char path[300];
        snprintf(path, sizeof path, "/modules/%s", names[i]->d_name);
        if (names[i]->d_name[0] == '.') continue;
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0 && syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST) say("%s: %s", path, strerror(errno));
        close_fd(&fd);
        unlink(path); /* its memory is better used */
    }
}

/* Leave the initial file system: pivot_root does not work on it, and the workload's init needs that. */
static void switch_root(void) {
    static const char *const folders[] = {"/proc", "/sys", "/dev"};
    char path[64];
    mkdir("/newroot", 0755);
    if (mount("tmpfs", "/newroot", "tmpfs", MS_NODEV | MS_NOSUID, "mode=755,size=1m") < 0) die("tmpfs");
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "/newroot%s", folders[i]);
        mkdir(path, 0755);
        if (mount(folders[i], path, NULL, MS_MOVE, NULL) < 0) die(folders[i]);
    }
    unlink("/init");
    if (chdir("/newroot") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0) die("switch_root");
    mkdir("/run", 0755);
    mkdir("/run/base", 0755);
    mkdir("/run/work", 0755);
    mkdir("/run/root", 0755);
}

static void raise_loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) < 0) say("lo: %s", strerror(errno));
    close_fd(&fd);
}

static void start_outer_init(void) {
    char path[64];
    struct clone_args args = {.flags = CLONE_NEWPID, .exit_signal = SIGCHLD};
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    if (pid == 0) {
        default_signals();
        init_loop();
    }
    snprintf(path, sizeof path, "%d/ns/pid", pid);
    g.outer_pids = openat(g.proc, path, O_RDONLY | O_CLOEXEC);
    g.own_pids = openat(g.proc, "self/ns/pid", O_RDONLY | O_CLOEXEC);
    if (pid < 0 || g.outer_pids < 0 || g.own_pids < 0) die("pid namespace");
}

static int open_port(void) {
    char path[300], name[64];
    for (int tries = 0; tries < 1000; tries++) {
        DIR *dir = opendir("/sys/class/virtio-ports");
        struct dirent *d;
        while (dir && (d = readdir(dir)) != NULL) {
            snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", d->d_name);
            if (d->d_name[0] == '.' || read_file(path, name, sizeof name) <= 0) continue;
            name[strcspn(name, "\n")] = 0;
            if (strcmp(name, PORT_NAME) != 0) continue;
            snprintf(path, sizeof path, "/dev/%s", d->d_name);
            int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
            closedir(dir);
            if (fd < 0) die(path);
            return fd;
        }
        if (dir) closedir(dir);
        usleep(10000);
    }
    errno = ENODEV;
    die("no port " PORT_NAME);
    return -1;
}

static void protect_self(void) {
    struct sched_param priority = {.sched_priority = 1};
    set_oom_score("-1000");
    /* a thousand busy processes must not keep a heartbeat waiting; children do not inherit this */
    sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &priority);
    set_limit(RLIMIT_NOFILE, 8192, 8192);
}

/* What the workload may not ask of the kernel, whatever its user. */
static void harden_kernel(void) {
    put_file("/proc/sys/user/max_user_namespaces", "0"); /* Docker's seccomp filter forbids them too */
    put_file("/proc/sys/kernel/kexec_load_disabled", "1");
    put_file("/proc/sys/kernel/modules_disabled", "1");
    put_file("/proc/sys/kernel/dmesg_restrict", "1");
    put_file("/proc/sys/kernel/unprivileged_bpf_disabled", "1");
    put_file("/proc/sys/kernel/sysrq", "0");
    put_file("/proc/sys/kernel/core_pattern", "core");
    put_file("/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
    put_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"); /* as in Docker */
}

static void open_signals(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    g.signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
}

static void boot(void) {
    clearenv();
    umask(022);
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mkdir("/dev", 0755);
    mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, NULL);
    for (int fd = open("/dev/console", O_RDWR); fd >= 0 && fd < 2;) fd = dup(fd);
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) die("/proc");
    if (mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) die("/sys");
    load_modules();
    switch_root();
    g.proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    g.urandom = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    protect_self();
    harden_kernel();
    make_cgroups();
    start_outer_init();
    raise_loopback();
    open_signals();
    g.port = open_port();
    reboot(RB_DISABLE_CAD);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--test-fd")) {
        g.plain = true;
        g.host_seen = true;
        g.port = atoi(argv[2]);
        fcntl(g.port, F_SETFL, O_NONBLOCK);
        fcntl(g.port, F_SETFD, FD_CLOEXEC);
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        open_signals();
    } else if (getpid() == 1) {
        boot();
    } else {
        fprintf(stderr, "dayfly's guest agent runs as PID 1 of a microVM, or with --test-fd N as a test\n");
        return 2;
    }
    for (;;) turn();
}
