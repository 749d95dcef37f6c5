/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes of frames, as docs/guest-protocol.md section 1 defines them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chan.h"
#include "check.h"
#include "tlv.h"

/* DATA of 5 bytes on fd 2, session 0x01020304, call 7, written down by hand. */
static const uint8_t wire[VHPC_HEADER] = {5, 0, 0, 0, 6, 2, 0, 0, 4, 3, 2, 1, 7, 0, 0, 0};

static void header_has_the_documented_layout(void **state)
{
    (void)state;
    uint8_t out[VHPC_HEADER];
    struct frame f = {.length = 5, .type = VHPC_DATA, .fd = 2, .session = 0x01020304, .call = 7};
    frame_pack(out, &f);
    assert_memory_equal(out, wire, sizeof wire);
    struct frame back;
    assert_int_equal(frame_unpack(wire, &back), 0);
    assert_int_equal(back.length, 5);
    assert_int_equal(back.type, VHPC_DATA);
    assert_int_equal(back.fd, 2);
    assert_int_equal(back.session, 0x01020304);
    assert_int_equal(back.call, 7);
}

static void impossible_headers_are_refused(void **state)
{
    (void)state;
    struct frame f;
    uint8_t bad[VHPC_HEADER];
    memcpy(bad, wire, sizeof bad);
    bad[2] = 4;
    bad[0] = 1; /* 262145 bytes */
    assert_int_equal(frame_unpack(bad, &f), -EPROTO);
    memcpy(bad, wire, sizeof bad);
    bad[4] = 0;
    assert_int_equal(frame_unpack(bad, &f), -EPROTO);
    bad[4] = 19;
    assert_int_equal(frame_unpack(bad, &f), -EPROTO);
    memcpy(bad, wire, sizeof bad);
    bad[6] = 4; /* a flag that does not exist */
    assert_int_equal(frame_unpack(bad, &f), -EPROTO);
}

static void field_has_the_documented_layout(void **state)
{
    (void)state;
    static const uint8_t expected[] = {20, 0, 0, 0, 2, 0, 0, 0, 'l', 's'};
    struct buf b = {0};
    assert_int_equal(tlv_put_str(&b, TAG_ARG, "ls"), 0);
    assert_int_equal(b.len, sizeof expected);
    assert_memory_equal(buf_head(&b), expected, sizeof expected);
    buf_free(&b);
}

static void fields_that_pass_the_end_are_refused(void **state)
{
    (void)state;
    static const uint8_t too_long[] = {20, 0, 0, 0, 3, 0, 0, 0, 'l', 's'};
    static const uint8_t truncated[] = {20, 0, 0, 0, 3};
    static const uint8_t huge[] = {20, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 'x'};
    static const uint8_t not_zero[] = {20, 0, 1, 0, 0, 0, 0, 0};
    struct tlv t;
    assert_int_equal(tlv_next(&(struct tlv_reader){too_long, sizeof too_long}, &t), -EPROTO);
    assert_int_equal(tlv_next(&(struct tlv_reader){truncated, sizeof truncated}, &t), -EPROTO);
    assert_int_equal(tlv_next(&(struct tlv_reader){huge, sizeof huge}, &t), -EPROTO);
    assert_int_equal(tlv_next(&(struct tlv_reader){not_zero, sizeof not_zero}, &t), -EPROTO);
}

static void text_with_a_nul_is_refused(void **state)
{
    (void)state;
    char *text = NULL, fixed[8];
    struct tlv t = {.tag = TAG_ARG, .len = 3, .data = (const uint8_t *)"a\0b"};
    assert_int_equal(tlv_str(&t, &text), -EPROTO);
    assert_null(text);
    assert_int_equal(tlv_str_into(&t, fixed, sizeof fixed), -EPROTO);
    t = (struct tlv){.tag = TAG_ARG, .len = 8, .data = (const uint8_t *)"12345678"};
    assert_int_equal(tlv_str_into(&t, fixed, sizeof fixed), -EPROTO);
}

static void bytes_replace_an_earlier_copy(void **state)
{
    (void)state;
    uint8_t *copy = NULL;
    size_t len = 0;
    struct tlv t = {.tag = TAG_ZONE_DATA, .len = 3, .data = (const uint8_t *)"a\0b"};
    assert_int_equal(tlv_bytes(&t, &copy, &len), 0);
    t = (struct tlv){.tag = TAG_ZONE_DATA, .len = 2, .data = (const uint8_t *)"cd"};
    assert_int_equal(tlv_bytes(&t, &copy, &len), 0);
    assert_int_equal(len, 2);
    assert_memory_equal(copy, "cd", 2);
    t.len = 0;
    assert_int_equal(tlv_bytes(&t, &copy, &len), 0);
    assert_int_equal(len, 2);
    free(copy);
}

static void queue_keeps_bytes_in_order_while_it_grows_and_moves(void **state)
{
    (void)state;
    struct buf b = {0};
    uint8_t next_in = 0, next_out = 0;
    for (int round = 0; round < 2000; round++) {
        uint8_t part[97];
        for (size_t i = 0; i < sizeof part; i++)
            part[i] = next_in++;
        assert_int_equal(buf_append(&b, part, sizeof part), 0);
        for (int i = 0; i < 50; i++) {
            assert_int_equal(*buf_head(&b), next_out++);
            buf_consume(&b, 1);
        }
    }
    assert_int_equal(b.len, 2000 * 47);
    buf_free(&b);
}

static void message_of_several_frames_is_put_together(void **state)
{
    (void)state;
    struct message m = {0};
    struct frame first = {
        .type = VHPC_EXEC, .flags = VHPC_MORE, .length = 3, .payload = (const uint8_t *)"abc"};
    struct frame last = {.type = VHPC_EXEC, .length = 2, .payload = (const uint8_t *)"de"};
    assert_int_equal(message_add(&m, &first), 0);
    assert_int_equal(message_add(&m, &last), 1);
    assert_int_equal(m.data.len, 5);
    assert_memory_equal(buf_head(&m.data), "abcde", 5);
    message_reset(&m);
}

static void message_is_bounded_and_makes_progress(void **state)
{
    (void)state;
    struct message m = {0};
    uint8_t *part = calloc(1, VHPC_PAYLOAD_MAX);
    assert_non_null(part);
    struct frame f = {
        .type = VHPC_EXEC, .flags = VHPC_MORE, .length = VHPC_PAYLOAD_MAX, .payload = part};
    for (int i = 0; i < VHPC_MESSAGE_MAX / VHPC_PAYLOAD_MAX; i++)
        assert_int_equal(message_add(&m, &f), 0);
    assert_int_equal(message_add(&m, &f), -EPROTO);
    message_reset(&m);
    assert_int_equal(message_add(&m, &f), 0);
    f.length = 0;
    assert_int_equal(message_add(&m, &f), -EPROTO);
    f = (struct frame){.type = VHPC_REQUEST, .length = 1, .payload = part};
    assert_int_equal(message_add(&m, &f), -EPROTO); /* another type in between */
    message_reset(&m);
    free(part);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(header_has_the_documented_layout),
        cmocka_unit_test(impossible_headers_are_refused),
        cmocka_unit_test(field_has_the_documented_layout),
        cmocka_unit_test(fields_that_pass_the_end_are_refused),
        cmocka_unit_test(text_with_a_nul_is_refused),
        cmocka_unit_test(bytes_replace_an_earlier_copy),
        cmocka_unit_test(queue_keeps_bytes_in_order_while_it_grows_and_moves),
        cmocka_unit_test(message_of_several_frames_is_put_together),
        cmocka_unit_test(message_is_bounded_and_makes_progress),
    };
    return cmocka_run_group_tests_name("frames", tests, NULL, NULL);
}
