/* What happens between fork and execve: spaces, users, capabilities. */
#ifndef DAYFLY_PROGRAM_H
#define DAYFLY_PROGRAM_H

#include "wire.h"

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
    if (!g.privileged) drop_capabilities();
    if (setgroups((size_t)user->group_count, user->groups) < 0 || setresgid(user->gid, user->gid, user->gid) < 0 ||
        setresuid(user->uid, user->uid, user->uid) < 0)
        refuse_errno("user");
    if (user->uid == 0 && !g.privileged) {
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

#endif
