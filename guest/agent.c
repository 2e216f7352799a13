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
#include "spaces.h"

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
    } else if (p.space == WORK && g.frozen) {
        fail_op(o, "frozen", "the workload is frozen: nothing could run in it");
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
    if (o->takes_namespace) give_space_back();
    if (!strcmp(name, "freeze") || !strcmp(name, "thaw")) g.frozen = !g.plain && *name == 'f';
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

/* Disks are told apart by the serial number that the host gives them. Asking for it does not read the disk. */
static bool find_disk(const char *serial, char *path, size_t size) {
    char name[64], text[32];
    for (char letter = 'a'; letter <= 'f'; letter++) {
        snprintf(name, sizeof name, "/sys/block/vd%c/serial", letter);
        if (read_file(name, text, sizeof text) <= 0) continue;
        text[strcspn(text, "\n")] = 0;
        if (strcmp(text, serial) != 0) continue;
        snprintf(path, size, "/dev/vd%c", letter);
        return true;
    }
    return false;
}

static void find_disks(void) {
    for (int tries = 0; tries < 200; tries++) {
        if (find_disk("base", g.base_disk, sizeof g.base_disk) && find_disk("work", g.work_disk, sizeof g.work_disk)) return;
        usleep(10000);
    }
}

/* Read one report of a child: a sign and fields, at most STATUS_MAX bytes, at once or followed by the end. The agent
 * does nothing else meanwhile; the host waits for the same thing. */
static bool await_report(int fd, char *text, size_t *length) {
    struct pollfd p = {fd, POLLIN, 0};
    *length = 0;
    if (poll(&p, 1, ACK_TIMEOUT_MS) <= 0) return false;
    for (ssize_t n; *length < STATUS_MAX && (n = read(fd, text + *length, STATUS_MAX - *length)) > 0;) *length += (size_t)n;
    return *length > 0 && text[0] == '+';
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

/* The new init is made by a child within the outer pid namespace, so that, as the child's sibling, it is one level
 * below that. It is ours to wait for, with the child's own exit signal. */
static void spawn_work_init(void) {
    struct clone_args args = {.flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_PARENT};
    char text[STATUS_MAX];
    size_t length;
    int go;
    if (!make_pipe(&g.work_go, &go, false)) die("pipe");
    if (fork_reporting(g.outer_pids, &g.work_report) == 0) {
        pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
        if (pid < 0) refuse_errno("work init");
        close_fd(&g.work_go);
        if (pid == 0) work_init(go);
        _exit(0);
    }
    close(go);
    bool made = await_report(g.work_report, text, &length);
    struct fields told = {(uint8_t *)text + 1, length ? length - 1 : 0};
    if (!made || !text_field(&told, "pid", g.work_pid, sizeof g.work_pid)) {
        if (length > 1) write_all(2, text + 1, length - 1);
        die("the workload's space");
    }
}

static void open_work_namespaces(void) {
    char path[64];
    snprintf(path, sizeof path, "%s/ns/mnt", g.work_pid);
    g.work_mounts = openat(g.proc, path, O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "%s/ns/pid", g.work_pid);
    g.work_pids = openat(g.proc, path, O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "%s/root/dev/pts", g.work_pid);
    g.work_pts = openat(g.proc, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (g.work_mounts < 0 || g.work_pids < 0 || g.work_pts < 0) die("namespaces of the workload");
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

/* The workload's init mounts the disks and goes there: an image that the kernel chokes on is an answer, and not the
 * end of the agent. */
static bool enter_work(char *text, size_t *length) {
    *length = 0;
    write_etc_files();
    if (write(g.work_go, "", 1) != 1 || !await_report(g.work_report, text, length)) return false;
    close_fd(&g.work_go);
    close_fd(&g.work_report);
    open_work_namespaces();
    for (int i = 0; i < ETC_FILES; i++) {
        char path[64];
        snprintf(path, sizeof path, "/etc/%s", etc_files[i]);
        note_made(path);
    }
    note_made("/proc");
    note_made("/sys");
    note_made("/dev");
    return true;
}

static void do_setup(uint32_t id, const struct fields *f) {
    char text[STATUS_MAX + 1];
    size_t length;
    struct buffer b = {0};
    if (!text_field(f, "workdir", g.workdir, sizeof g.workdir) || g.workdir[0] != '/') strcpy(g.workdir, "/");
    char privileged[8];
    g.privileged = text_field(f, "privileged", privileged, sizeof privileged) && !strcmp(privileged, "1");
    if (!g.plain && !enter_work(text, &length)) {
        send_reported(id, text, length);
        return;
    }
    g.state = READY;
    add_sizes(&b);
    send_fields(REPLY, id, &b);
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
    /* shared: the workload's init mounts the disks here when they are known, and the mounts arrive at ours */
    if (mount("tmpfs", "/run", "tmpfs", MS_NODEV | MS_NOSUID, "mode=755,size=1m") < 0 || mount(NULL, "/run", NULL, MS_SHARED, NULL) < 0) die("/run");
    mkdir("/run/base", 0755);
    mkdir("/run/work", 0755);
    mkdir("/run/root", 0755);
    mkdir("/skeleton", 0755);
    mkdir("/run/etc", 0755);
    if (mount("tmpfs", "/run/etc", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=256k") < 0) die("/run/etc");
    for (int i = 0; i < ETC_FILES; i++) {
        snprintf(path, sizeof path, "/run/etc/%s", etc_files[i]);
        put_file(path, "");
    }
    put_file("/run/etc/boot_id", "");
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
    find_disks();
    spawn_work_init(); /* it must know the disks */
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
