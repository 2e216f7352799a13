/* A guest agent that boots and greets like the real one, and then does not confirm that it is a clone:
 * -DOTHER_NONCE  answers with another nonce          -DOTHER_TIME  says that its clock is an hour off
 * -DSILENT       does not answer
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint8_t in[1 << 17], out[4096];
static uint32_t out_length;

static int visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void load_modules(void)
{
    struct dirent **names;
    int count = scandir("/modules", &names, visible, alphasort);
    for (int i = 0; i < count; i++) {
        char path[512];
        snprintf(path, sizeof path, "/modules/%s", names[i]->d_name);
        int fd = open(path, O_RDONLY);
        syscall(SYS_finit_module, fd, "", 0);
        close(fd);
    }
}

static int open_port(void)
{
    for (;; usleep(2000)) {
        struct dirent **ports;
        int count = scandir("/sys/class/virtio-ports", &ports, visible, alphasort);
        for (int i = 0; i < count; i++) {
            char path[512], name[32] = "";
            snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", ports[i]->d_name);
            int fd = open(path, O_RDONLY);
            if (fd >= 0 && read(fd, name, sizeof name - 1) > 0 && !strncmp(name, "dayfly.agent", 12)) {
                snprintf(path, sizeof path, "/dev/%s", ports[i]->d_name);
                return open(path, O_RDWR);
            }
            close(fd);
        }
    }
}

static void read_all(int fd, void *data, size_t length)
{
    for (size_t got = 0; got < length;) {
        ssize_t n = read(fd, (char *)data + got, length - got);
        if (n > 0)
            got += n;
        else
            usleep(2000);
    }
}

static void field(const char *key, const void *value, uint32_t length)
{
    out[out_length++] = strlen(key);
    memcpy(out + out_length, key, strlen(key));
    out_length += strlen(key);
    memcpy(out + out_length, &length, 4);
    memcpy(out + out_length + 4, value, length);
    out_length += 4 + length;
}

static const uint8_t *find(const char *key, uint32_t length)
{
    return memmem(in, length, key, strlen(key));
}

static void reply(int port, uint32_t id)
{
    uint8_t header[12] = {0, 0, 0, 0, 2};
    memcpy(header, &out_length, 4);
    memcpy(header + 8, &id, 4);
    write(port, header, sizeof header);
    write(port, out, out_length);
    out_length = 0;
}

static void answer_clone(int port, uint32_t id, uint32_t length)
{
#ifdef SILENT
    return;
#endif
    uint8_t nonce[16];
    const uint8_t *at = find("nonce", length), *time = find("time_ns", length);
    uint32_t size;
    memcpy(nonce, at + 5 + 4, sizeof nonce);
    memcpy(&size, time + 7, 4);
    char text[32] = "";
    memcpy(text, time + 7 + 4, size < 31 ? size : 31);
#ifdef OTHER_NONCE
    nonce[0] ^= 1;
#endif
#ifdef OTHER_TIME
    snprintf(text, sizeof text, "%lld", atoll(text) - 3600000000000);
#endif
    field("nonce", nonce, sizeof nonce);
    field("time_ns", text, strlen(text));
    reply(port, id);
}

int main(void)
{
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sys", "/sys", "sysfs", 0, NULL);
    load_modules();
    int port = open_port();
    for (;;) {
        uint32_t length, id;
        uint8_t header[12];
        read_all(port, header, sizeof header);
        memcpy(&length, header, 4);
        memcpy(&id, header + 8, 4);
        read_all(port, in, length);
        if (find("hello", length)) {
            field("version", "1", 1);
            field("state", "waiting", 7);
            reply(port, id);
        } else
            answer_clone(port, id, length);
    }
}
