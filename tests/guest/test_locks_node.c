/* SPDX-License-Identifier: Apache-2.0 */
/* promise: shares.locks */
/* Locks on files of shared folders: the node's side, and what a guest's broker holds there. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "file.h"
#include "files.h"
#include "sandbox.h"
#include "serve.h"

struct site {
    char folder[PATH_MAX];
    struct locks_server server[2]; /* of two guests */
    uint64_t inode;
};

static struct site *site;

static void path_of(char out[PATH_MAX], const char *name)
{
    (void)snprintf(out, PATH_MAX, "%.4000s/%s", site->folder, name);
}

static int set_up(void **state)
{
    char path[PATH_MAX];
    struct stat st;
    (void)state;
    site = calloc(1, sizeof *site);
    assert_non_null(site);
    (void)strcpy(site->folder, "/tmp/vhpc-locks-XXXXXX");
    assert_non_null(mkdtemp(site->folder));
    path_of(path, "f");
    assert_int_equal(write_file(path, 0600, "0123456789"), 0);
    assert_int_equal(stat(path, &st), 0);
    site->inode = st.st_ino;
    path_of(path, "link");
    assert_int_equal(symlink("f", path), 0);
    for (int i = 0; i < 2; i++) {
        static char specs[2][PATH_MAX + 32];
        (void)snprintf(specs[i], sizeof specs[i], "home0:cluster:%s", site->folder);
        assert_int_equal(locks_server_add(&site->server[i], specs[i], false), 0);
    }
    return 0;
}

static int tear_down(void **state)
{
    static const char *const names[] = {"f", "link", "fifo"};
    char path[PATH_MAX];
    (void)state;
    locks_server_free(&site->server[0]);
    locks_server_free(&site->server[1]);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        path_of(path, names[i]);
        (void)unlink(path);
    }
    assert_int_equal(rmdir(site->folder), 0);
    free(site);
    return 0;
}

static struct locks_reply ask(int guest, struct locks_request r)
{
    struct locks_reply reply;
    r.inode = r.inode != 0 ? r.inode : site->inode;
    r.tag = r.tag != NULL ? r.tag : "home0";
    r.path = r.path != NULL ? r.path : "f";
    r.end = r.end != 0 ? r.end : LOCKS_END;
    locks_server_answer(&site->server[guest], &r, &reply);
    return reply;
}

#define SET(...) ((struct locks_request){.op = LOCKS_SET, __VA_ARGS__})

static void guests_exclude_each_other_by_ranges(void **state)
{
    (void)state;
    assert_int_equal(ask(0, SET(.mode = 2, .start = 10, .end = 19)).error, 0);
    assert_int_equal(ask(1, SET(.mode = 1, .start = 0, .end = 10)).error, EAGAIN);
    assert_int_equal(ask(1, SET(.mode = 2, .start = 20)).error, 0);
    struct locks_reply found =
        ask(1, (struct locks_request){.op = LOCKS_TEST, .mode = 1, .start = 0});
    assert_int_equal(found.error, 0);
    assert_int_equal(found.mode, LOCKS_EXCLUSIVE);
    assert_int_equal(found.start, 10);
    assert_int_equal(found.end, 19);
    assert_int_equal(ask(0, SET(.mode = 1, .start = 10, .end = 19)).error, 0);
    assert_int_equal(ask(1, SET(.mode = 1, .start = 0, .end = 10)).error, 0);
    assert_int_equal(ask(0, (struct locks_request){.op = LOCKS_CLOSE}).error, 0);
    assert_int_equal(ask(1, SET(.mode = 2)).error, 0);
}

static void guests_and_programs_of_hosts_exclude_each_other(void **state)
{
    (void)state;
    char path[PATH_MAX];
    path_of(path, "f");
    int own = open(path, O_RDWR | O_CLOEXEC);
    struct flock all = {.l_type = F_WRLCK};
    assert_int_equal(ask(0, SET(.mode = 2)).error, 0);
    assert_int_equal(fcntl(own, F_SETLK, &all), -1);
    assert_int_equal(ask(0, SET(.mode = 0)).error, 0);
    assert_int_equal(fcntl(own, F_SETLK, &all), 0);
    assert_int_equal(ask(0, SET(.mode = 1)).error, EAGAIN);
    assert_int_equal(flock(own, LOCK_SH), 0);
    assert_int_equal(ask(0, SET(.kind = LOCKS_FLOCK, .mode = 1)).error, 0);
    struct locks_reply refused = ask(0, SET(.kind = LOCKS_FLOCK, .mode = 2));
    assert_int_equal(refused.error, EAGAIN);
    assert_int_equal(refused.mode, LOCKS_SHARED); /* it has it still, or again */
    assert_int_equal(flock(own, LOCK_UN), 0);
    assert_int_equal(ask(0, SET(.kind = LOCKS_FLOCK, .mode = 2)).error, 0);
    assert_int_equal(flock(own, LOCK_SH | LOCK_NB), -1);
    (void)close(own);
}

static void only_the_same_file_inside_of_the_share_is_locked(void **state)
{
    (void)state;
    char path[PATH_MAX];
    struct stat st;
    assert_int_equal(ask(0, SET(.mode = 1, .inode = site->inode + 1)).error, ESTALE);
    assert_int_equal(ask(0, SET(.mode = 1, .path = "link")).error, ESTALE);
    assert_int_equal(ask(0, SET(.mode = 1, .path = "nothing")).error, ESTALE);
    assert_int_equal(ask(0, SET(.mode = 1, .path = "../f")).error, EXDEV);
    assert_int_equal(ask(0, SET(.mode = 1, .path = "/etc/passwd")).error, EXDEV);
    assert_int_equal(ask(0, SET(.mode = 1, .tag = "site1")).error, ENOLCK);
    path_of(path, "fifo");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(ask(0, SET(.mode = 1, .path = "fifo", .inode = st.st_ino)).error, EOPNOTSUPP);
    assert_int_equal(stat(site->folder, &st), 0);
    assert_int_equal(
        ask(0, SET(.kind = LOCKS_FLOCK, .mode = 2, .path = ".", .inode = st.st_ino)).error, 0);
}

static void the_first_message_lists_the_shares(void **state)
{
    (void)state;
    char spec[PATH_MAX + 32], wrong[] = "site2:all:/", missing[] = "site2:cluster:/nothing/there";
    (void)snprintf(spec, sizeof spec, "site1:refuse:%s", site->folder);
    assert_int_equal(locks_server_add(&site->server[0], spec, true), 0);
    assert_int_equal(locks_server_add(&site->server[0], wrong, true), -EINVAL);
    assert_int_equal(locks_server_add(&site->server[0], missing, true), -ENOENT);
    struct locks_reply r = ask(0, (struct locks_request){.op = LOCKS_HELLO, .file = LOCKS_VERSION});
    assert_int_equal(r.error, 0);
    assert_int_equal(r.text_len, strlen("cluster home0\nrefuse site1\n"));
    assert_memory_equal(r.text, "cluster home0\nrefuse site1\n", r.text_len);
    r = ask(0, (struct locks_request){.op = LOCKS_HELLO, .file = LOCKS_VERSION + 1});
    assert_int_equal(r.error, EPROTONOSUPPORT);
    assert_int_equal(ask(0, SET(.mode = 1, .tag = "site1")).error, ENOLCK);
}

/* Open files in the sandbox; the exit status of a process, 0 if all is as it should be. */
static int opens_in_sandbox(void)
{
    char path[PATH_MAX];
    path_of(path, "f");
    int rc = sandbox_enter(&site->server[0]);
    if (rc == -ENOSYS || rc == -EOPNOTSUPP)
        return 77;
    if (rc < 0 || open("/etc/passwd", O_RDONLY | O_CLOEXEC) >= 0 || errno != EACCES)
        return 1;
    if (open("/dev/null", O_RDWR | O_CLOEXEC) >= 0)
        return 2;
    return ask(0, SET(.mode = 2)).error == 0 ? 0 : 3;
}

static void the_daemon_opens_files_of_its_shares_only(void **state)
{
    int status;
    (void)state;
    pid_t child = fork();
    if (child == 0)
        _exit(opens_in_sandbox());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip(); /* this kernel has no Landlock */
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* A guest's table, whose port has the node's side at its other end. */
struct guest {
    struct locked_files files;
    pthread_t thread;
    int end[2], number;
};

static void *serve(void *arg)
{
    const struct guest *g = arg;
    uint8_t in[LOCKS_REQUEST + LOCKS_TEXT_MAX], out[LOCKS_REPLY + LOCKS_TEXT_MAX];
    struct locks_request r;
    struct locks_reply reply;
    for (ssize_t n; (n = recv(g->end[1], in, sizeof in, 0)) > 0;) {
        if (locks_unpack_request(in, (size_t)n, &r) != n)
            return NULL;
        locks_server_answer(&site->server[g->number], &r, &reply);
        (void)write_all(g->end[1], out, locks_pack_reply(out, &reply));
    }
    return NULL;
}

static struct guest *start_guest(int number)
{
    struct guest *g = calloc(1, sizeof *g);
    assert_non_null(g);
    g->number = number;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, g->end), 0);
    g->files.node.fd = g->end[0];
    assert_int_equal(pthread_create(&g->thread, NULL, serve, g), 0);
    return g;
}

static void end_guest(struct guest *g)
{
    files_need_nothing(&g->files);
    (void)files_settle(&g->files, 10000);
    (void)files_settle(&g->files, 12000);
    assert_int_equal(g->files.used, 0);
    (void)close(g->end[0]);
    (void)pthread_join(g->thread, NULL);
    (void)close(g->end[1]);
    free(g);
}

static int raise_lock(struct guest *g, struct locks_range r)
{
    struct locked_file *l = files_find(&g->files, 45, site->inode);
    bool asked = false;
    if (l == NULL)
        l = files_add(&g->files, 45, site->inode, "home0", "f");
    return files_raise(&g->files, l, LOCKS_FCNTL, r, &asked);
}

/* The kernel's table of the guest, with one lock of the file or none. */
static void programs_have(struct guest *g, const char *lock)
{
    char name[] = "/tmp/vhpc-table-XXXXXX", text[512];
    int fd = mkstemp(name);
    (void)snprintf(text, sizeof text,
                   "1: POSIX  ADVISORY  WRITE 7 00:2e:%llu 0 EOF\n"
                   "1: -> POSIX  ADVISORY  WRITE 8 00:2d:%llu 0 EOF\n"
                   "2: LEASE  ACTIVE    READ  7 00:2d:%llu 0 EOF\n",
                   (unsigned long long)site->inode, (unsigned long long)site->inode,
                   (unsigned long long)site->inode);
    assert_int_equal(write_all(fd, text, strlen(text)), 0);
    if (lock != NULL) {
        (void)snprintf(text, sizeof text, "3: POSIX  ADVISORY  %s", lock);
        (void)snprintf(strchr(text, '#'), 64, "00:2d:%llu%s", (unsigned long long)site->inode,
                       strchr(lock, '#') + 1);
        assert_int_equal(write_all(fd, text, strlen(text)), 0);
    }
    (void)close(fd);
    files_need_nothing(&g->files);
    assert_int_equal(files_need_locks(&g->files, name), 0);
    (void)unlink(name);
    (void)files_settle(&g->files, 5);
}

static void what_programs_do_not_have_any_more_is_given_back(void **state)
{
    (void)state;
    struct guest *one = start_guest(0), *two = start_guest(1);
    assert_int_equal(raise_lock(one, (struct locks_range){0, 99, LOCKS_EXCLUSIVE}), 0);
    assert_int_equal(raise_lock(two, (struct locks_range){50, 60, LOCKS_SHARED}), -EAGAIN);
    programs_have(one, "WRITE 7 # 0 49\n");
    assert_int_equal(raise_lock(two, (struct locks_range){50, 60, LOCKS_SHARED}), 0);
    assert_int_equal(raise_lock(two, (struct locks_range){49, 49, LOCKS_SHARED}), -EAGAIN);
    programs_have(one, "READ  7 # 0 EOF\n"); /* the range is the whole file now, and shared */
    assert_int_equal(raise_lock(two, (struct locks_range){49, 49, LOCKS_SHARED}), 0);
    assert_int_equal(raise_lock(two, (struct locks_range){49, 49, LOCKS_EXCLUSIVE}), -EAGAIN);
    programs_have(one, NULL);
    assert_int_equal(raise_lock(two, (struct locks_range){0, LOCKS_END, LOCKS_EXCLUSIVE}), 0);
    end_guest(one);
    end_guest(two);
}

static void a_node_that_does_not_answer_gives_no_locks(void **state)
{
    (void)state;
    struct guest *g = start_guest(0);
    (void)shutdown(g->end[1], SHUT_RDWR);
    assert_int_equal(raise_lock(g, (struct locks_range){0, 1, LOCKS_SHARED}), -ENOLCK);
    assert_int_equal(g->files.node.fd, -1);
    assert_int_equal(raise_lock(g, (struct locks_range){0, 1, LOCKS_SHARED}), -ENOLCK);
    files_need_nothing(&g->files);
    (void)files_settle(&g->files, 10000);
    (void)files_settle(&g->files, 12000);
    (void)pthread_join(g->thread, NULL);
    (void)close(g->end[1]);
    free(g);
}

static void an_interrupt_ends_the_wait_for_an_answer(void **state)
{
    (void)state;
    int end[2], wake[2];
    struct locks_request r = {.op = LOCKS_HELLO, .file = LOCKS_VERSION};
    struct locks_reply reply;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, end), 0);
    assert_int_equal(pipe(wake), 0);
    struct locks_node n = {.fd = end[0], .interrupt = wake[0]};
    assert_int_equal(write(wake[1], "", 1), 1);
    assert_int_equal(node_ask(&n, &r, &reply), -EIO);
    assert_int_equal(n.fd, -1);
    (void)close(end[1]);
    (void)close(wake[0]);
    (void)close(wake[1]);
}

static void nothing_is_held_on_another_node(void **state)
{
    (void)state;
    struct guest *g = start_guest(0);
    struct locks_range r = {0, 9, LOCKS_EXCLUSIVE};
    bool asked = false;
    assert_int_equal(raise_lock(g, r), 0);
    struct locked_file *l = files_find(&g->files, 45, site->inode);
    assert_int_equal(files_raise(&g->files, l, LOCKS_FCNTL, r, &asked), 0);
    assert_false(asked);
    files_hold_nothing(&g->files);
    assert_int_equal(files_raise(&g->files, l, LOCKS_FCNTL, r, &asked), 0);
    assert_true(asked);
    end_guest(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(guests_exclude_each_other_by_ranges, set_up, tear_down),
        cmocka_unit_test_setup_teardown(guests_and_programs_of_hosts_exclude_each_other, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(only_the_same_file_inside_of_the_share_is_locked, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(the_daemon_opens_files_of_its_shares_only, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(the_first_message_lists_the_shares, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_programs_do_not_have_any_more_is_given_back, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_node_that_does_not_answer_gives_no_locks, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(an_interrupt_ends_the_wait_for_an_answer, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(nothing_is_held_on_another_node, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
