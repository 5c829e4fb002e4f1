"""What every store promises; a test file subclasses this and gives a fixture `store`, empty and of its own."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from everstep.core.errors import ObjectExists, ObjectMissing, StoreError
from everstep.storage.store import Store, probe


class StoreContract:
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer])
    def test_reads_back_what_was_put(self, store: Store, kind: type) -> None:
        store.put("run/a.bin", kind(b"some bytes"))
        assert store.get("run/a.bin") == b"some bytes"
        assert type(store.get("run/a.bin")) is bytes

    def test_ranged_get(self, store: Store) -> None:
        store.put("a", b"0123456789")
        assert store.get("a", 3) == b"3456789"
        assert store.get("a", 3, 4) == b"3456"
        assert store.get("a", 8, 100) == b"89"
        assert store.get("a", 100) == b""
        assert store.get("a", 0, 0) == b""

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert [info.size for info in store.list("")] == [0]

    def test_put_creates_only(self, store: Store) -> None:
        store.put("run/a", b"first")
        with pytest.raises(ObjectExists, match="run/a"):
            store.put("run/a", b"second")
        assert store.get("run/a") == b"first"

    def test_missing_object(self, store: Store) -> None:
        store.put("run/a", b"x")
        for key in ("run/b", "other/a", "run", "run/a/b"):
            with pytest.raises(ObjectMissing, match=key):
                store.get(key)

    def test_list_takes_a_plain_string_prefix_and_sorts(self, store: Store) -> None:
        keys = ["a", "ab/1", "ab/2", "ab/2x/y", "abc", "b/1"]
        for key in reversed(keys):
            store.put(key, key.encode())
        for prefix in ("", "a", "ab", "ab/", "ab/2", "ab/2x/", "abc", "b", "c", "ab/9/", "/", "..", "a//"):
            found = store.list(prefix)
            assert [info.key for info in found] == [key for key in keys if key.startswith(prefix)], prefix
            assert all(info.size == len(info.key) and info.modified > 1e9 for info in found)

    def test_delete_twice(self, store: Store) -> None:
        store.put("run/a", b"x")
        store.delete("run/a")
        store.delete("run/a")
        assert store.list("") == []
        store.put("run/a", b"again")

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".tmp/a", "a/.b", "a\0b"])
    def test_names_no_store_can_hold(self, store: Store, key: str) -> None:
        with pytest.raises(StoreError, match="cannot be stored"):
            store.put(key, b"x")

    def test_one_of_many_writers_wins(self, store: Store) -> None:
        won: list[int] = []
        gate = threading.Barrier(8)

        def write(number: int) -> None:
            gate.wait()
            try:
                store.put("run/same", str(number).encode())
            except ObjectExists:
                return
            won.append(number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get("run/same") == str(won[0]).encode()

    def test_probe_passes_and_leaves_nothing(self, store: Store) -> None:
        probe(store)
        assert store.list("") == []

    @pytest.mark.parametrize("size", [0, 1, 3 << 20])
    def test_a_paced_put_asks_before_every_part(self, store: Store, size: int) -> None:
        asked: list[int] = []

        def pace(count: int) -> None:
            assert store.list("run/") == []
            asked.append(count)

        store.put("run/a", bytes(size), pace=pace)
        assert sum(asked) == size
        assert store.get("run/a") == bytes(size)

    def test_what_pace_raises_ends_the_put_and_leaves_nothing(self, store: Store) -> None:
        def stop(count: int) -> None:
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            store.put("run/a", bytes(100), pace=stop)
        assert store.list("") == []
        assert store.sweep(0) == 0
        store.put("run/a", b"again")

    def test_the_first_parts_of_the_keys(self, store: Store) -> None:
        assert store.tops() == ()
        for key in ("b/x/1", "a/1", "a/2", "a-1/z/y", "probe"):
            store.put(key, b"x")
        assert store.tops() == ("a", "a-1", "b")

    def test_list_after_a_key(self, store: Store) -> None:
        keys = ["a", "ab-1", "ab.x", "ab/1", "ab/2-3.x", "ab/2-4.x", "abc", "ab0", "b/1"]
        for key in keys:
            store.put(key, b"x")
        for prefix in ("", "a", "ab", "ab/", "ab/2", "ab-", "b", "c"):
            for after in "|a|aa|ab|ab-|ab-1|ab.x|ab/|ab/1|ab/2-3.x|ab/3|abc|b/1|c".split("|"):
                expected = sorted(key for key in keys if key.startswith(prefix) and key > after)
                assert [info.key for info in store.list(prefix, after)] == expected, (prefix, after)

    def test_sweep_leaves_what_is_there(self, store: Store) -> None:
        assert store.sweep(0) == 0
        store.put("run/a", b"x")
        assert store.sweep(0) == 0
        assert store.get("run/a") == b"x"
