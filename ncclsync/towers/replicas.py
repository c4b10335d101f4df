"""Hold a copy of every variable of tower 0 on each other tower, in its role, and send what has changed.

`sharding/roles.py` says what a role means.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError
from ncclsync.gradients.partitions import Processes
from ncclsync.gradients.sharded_optimizer import OptimizerSharding
from ncclsync.ops import current_context
from ncclsync.ops import held as held_ops
from ncclsync.sharding.holders import Holder
from ncclsync.sharding.roles import Role, role_of, start_value
from ncclsync.towers.layout import is_cpu
from ncclsync.towers.session import Session

_MEMORY = {"CPU": 1, "GPU": 2}  # DLPack's codes, by kinds of devices
_NAMED = 6  # variables in a message
_SENT = (Role.SAME, Role.SEED)  # roles whose copies follow from tower 0's variable alone
_WATCHED = (*_SENT, Role.PARTIAL)  # roles of variables that nobody but steps and methods may write unseen


class _Stale:
    """Say which variables are to be sent before the next step, and whether one was written while a step ran."""

    def __init__(self) -> None:
        self.keys: set[int] = set()  # ids of tower 0's variables
        self.left = native.Held()  # what variables hold, where copies follow from them, as the last step has left it
        self.running: list[int] = []  # the threads of steps under way
        self.disturbed = False

    def is_read_elsewhere(self) -> bool:
        """Return whether a step of another thread is under way."""
        return any(thread != threading.get_ident() for thread in self.running)


class Copies(Holder):
    """Hold one variable of tower 0 and its copies on the other towers; know when they are stale."""

    def __init__(
        self,
        variable: tf.Variable,
        role: Role,
        copies: list[tf.Variable],
        pending: _Stale,
        shared: set[int],
        session: Session,
        forget: Callable[[], None],
    ) -> None:
        """Track tower 0's variable, which is not kept alive; `forget` is called when it is deleted."""
        super().__init__(variable, forget)
        self.session = session
        self._key = id(variable)
        self.role = role  # how the copies relate now; `role_of`: how the next step needs them
        self.copies = copies  # [N - 1] of the other towers
        self.slot = pending.left.add()
        self._pending = pending  # the variable's id is added when the copies are stale
        self._shared = shared  # the variable's id is added when other `Towers` hold copies of it, too
        self._is_whole = False  # of parts: whether this process' first tower holds the whole
        self.track(reads=role is Role.PARTIAL or session.communicator.enqueues, keeps=role is Role.PARTIAL)

    def take_role(self, role: Role) -> None:
        """Give the copies another role from the next step on, that of a new trace."""
        self.gather_parts()
        self.role = role
        if role is Role.PARTIAL:
            self._let_tower_0_hold_all()
            self.track(reads=True, keeps=True)
        else:
            self._pending.keys.add(self._key)

    @property
    def is_between_steps(self) -> bool:
        """Return whether there are several towers, and no step of theirs is under way."""
        return self.session.layout.towers > 1 and not self._pending.running

    @property
    def variable(self) -> tf.Variable:
        """Return tower 0's variable, which this object must not keep alive."""
        variable = self.held
        if variable is None:
            raise NcclSyncError("Expected a variable in use. Received: one that was deleted.")
        return variable

    @property
    def _name(self) -> str:
        return self.session.names_of([self.variable])[0]

    def gather_parts(self) -> None:
        """Add up the towers' parts in tower 0's variable, so that it holds the whole.

        With several processes the first tower of each then holds the whole, until `keep_part`.
        """
        if self.role is not Role.PARTIAL or self._is_whole:
            return
        held_ops.let_go_of_written(self._pending.left, [self.variable], [self.slot])
        if not self._pending.left.knows(self.slot) and self._key not in self._shared:  # others add up their parts
            if any(bool(tf.reduce_any(copy.value() != 0)) for copy in self.copies):  # else no part is lost
                self.session.warn_once(
                    f"{self._name}, of which each tower holds a part, was written by a tf.function, or a raw op: the "
                    "other towers' parts are dropped, as by an assignment. Write such variables outside of "
                    "tf.functions, by methods of their own",
                    about="written parts",
                )
        elif self.session.layout.meets_processes:
            # Raw reads, which are not tracked.
            both = (self.variable, *self.copies)
            parts = [tf.raw_ops.ReadVariableOp(resource=tf_compat.handle_of(one), dtype=one.dtype) for one in both]
            total = self.session.total(parts, self.variable.name)
            self._is_whole = True
            self._pending.keys.add(self._key)
            tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(self.variable), value=total)
        else:
            for part in [copy.value() for copy in self.copies]:
                with tf.device(self.variable.device):
                    tf.raw_ops.AssignAddVariableOp(resource=tf_compat.handle_of(self.variable), value=tf.identity(part))
        self._let_tower_0_hold_all()

    def _let_tower_0_hold_all(self) -> None:
        for copy in self.copies:
            copy.assign(tf.zeros_like(copy))
        held_ops.compare(self._pending.left, [self.variable], [self.slot], [True], begins=False)

    def keep_part(self, is_root: bool) -> None:
        """Let the first tower of this process hold its part again, before a step: zeros, unless it is tower 0."""
        if self._is_whole:
            self._is_whole = False
            if not is_root:
                value = tf.zeros(self.variable.shape, self.variable.dtype)
                tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(self.variable), value=value)
            held_ops.compare(self._pending.left, [self.variable], [self.slot], [True], begins=False)

    def before_access(self, replaces: bool = False) -> None:
        """Let tower 0's variable hold the whole before Python reads or writes it."""
        if tf.executing_eagerly() and current_context() is None:
            if not replaces:
                self.session.failures.before_read(self._key)
            self.gather_parts()
            if replaces:  # so that the old value does not take memory beside the new one
                self._pending.left.forget(self.slot)
        elif not replaces and self.role is Role.PARTIAL and current_context() is None:
            raise NcclSyncError(
                f"Expected {self._name}, of which each tower holds a part, to be read and written outside of any "
                "tf.function. Received: a tf.function that does so. Call it without tf.function"
            )

    def mark_stale(self, replaced: bool = False) -> None:
        """Send the variable before the next step."""
        if replaced and current_context() is None:
            self.session.failures.replaced(self._key)
        # Metric state stays zero on the other towers, whatever tower 0 starts from. A partition differs from tower to
        # tower.
        if self.role not in (Role.SUM, Role.PARTITION):
            self._pending.keys.add(self._key)
            self._pending.disturbed |= bool(self._pending.running)
            if self.role is Role.PARTIAL:  # and tower 0 holds all of it, since it was read or written
                held_ops.compare(self._pending.left, [self.variable], [self.slot], [True], begins=False)

    def mark_shared(self) -> None:
        """From now on mark the copies of other `Towers` as stale when a step writes the variable."""
        self._shared.add(self._key)


class Replicas:
    """Say who holds which copy of a variable, and which copies are stale. Tower 0's variables are the user's."""

    def __init__(self, session: Session) -> None:
        self._session, options, layout = session, session.options, session.layout
        self._held: dict[int, Copies] = {}  # by id of tower 0's variable
        self._pending = _Stale()
        self._saved: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()  # by id; see `saved`
        self._sending = threading.RLock()
        self.left = self._pending.left
        self.sharding: OptimizerSharding | None = None  # divides the optimizers' state among the towers
        if options.shard_optimizer and layout.towers > 1:
            processes = Processes(layout.ranks, session.rows_of_all if layout.meets_processes else None)
            self.sharding = OptimizerSharding(layout.towers, options.bucket_bytes, processes, self.left)
        self.shared: set[int] = set()  # ids of the variables of which other `Towers` hold copies, too

    def of(self, variable: tf.Variable) -> list[tf.Variable]:
        """Return [n] the copies of tower 0's `variable`, one on each tower of this process, itself first.

        State of a shard (metrics, random state, accumulated gradients) has a copy for each shard. The copies are
        created on first use, with tower 0's value; but a metric's state starts from zero, and each tower has another
        random seed.
        """
        self._session.require_open()
        held, role = self._held.get(id(variable)), self.role_of(variable)
        if held is not None and len(held.copies) + 1 != len(self._holders(role)[0]):
            self._forget_copies(id(variable))
            held = None
        if held is None:
            copies, value = [], self._value_of(variable)
            for place, one in self._values(variable, role, value):
                if place == 0:
                    value = one
                    tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(variable), value=value)
                    continue
                with tf.device(self._device_of(variable, place, role)):
                    copies.append(
                        tf.Variable(one, trainable=variable.trainable, dtype=variable.dtype, shape=variable.shape)
                    )
            # Compiling a model again makes a new optimizer: the copies go with the old one's variables.
            forget = functools.partial(_forget, weakref.ref(self), id(variable))
            held = Copies(variable, role, copies, self._pending, self.shared, self._session, forget)
            self._held[id(variable)] = held
            self._hold([(held, value)])
        elif held.role is not role:
            held.take_role(role)
        return [variable, *held.copies]

    def of_shards(self, variable: tf.Variable) -> list[tf.Variable]:
        """Return [s] the copy that each shard uses, its own or its tower's; see `of`."""
        copies, towers = self.of(variable), self._session.layout.tower_places
        return copies if len(copies) == len(towers) else [copies[tower] for tower in towers]

    def role_of(self, variable: tf.Variable) -> Role:
        """Return how the copies of a variable relate."""
        return role_of(variable, same_seeds=self._session.options.exact_random)

    @property
    def variables(self) -> list[tf.Variable]:
        """Return tower 0's variables that have copies."""
        return [held.variable for held in list(self._held.values())]

    @property
    def identical(self) -> list[list[tf.Variable]]:
        """Return the copies of each variable that must be identical on all towers, the first tower's first."""
        return [[held.variable, *held.copies] for held in list(self._held.values()) if held.role is Role.SAME]

    def lies_where_joined(self, variable: tf.Variable) -> bool:
        """Return whether the communicator takes a variable's dtype, and the memory of its copies, one on each tower."""
        devices = [self._device_of(variable, place) for place in range(len(self._session.layout.devices))]
        kinds = [kind for kind, code in _MEMORY.items() if code in self._session.communicator.memory]
        return variable.dtype.name in native.DTYPES and all(any(kind in one for kind in kinds) for one in devices)

    def sync(self, *, compares: bool = True) -> None:
        """Send to all towers what others than their steps wrote into tower 0 since the last step.

        Join the towers anew if a collective had failed.

        Args:
            compares: whether to look for writes by raw ops, too: a step that begins does so itself.

        Raises:
            NcclError: a collective of an earlier step has failed, which has not been reported yet.
            NcclSyncError: the towers are closed, the call is inside a `tf.function`, or variables are lost.
        """
        session = self._session
        session.require_open()
        session.require_eager("towers to be read and trained")
        session.failures.check()
        session.communicator.reopen()
        session.failures.raise_lost(self._names_of_lost)
        if compares:
            self._compare()
        if self._pending.keys:
            self.send([key for key in list(self._held) if key in self._pending.keys])  # in one order in all processes
        if self.sharding is not None:
            self.sharding.divide()

    def report_writes(self, written: frozenset[int]) -> None:
        """Mark the variables with these ids, which a step has written, as stale for other `Towers` with copies."""
        for key in self.shared & written:
            if not self._held[key].mark_others_stale():
                self.shared.discard(key)  # the others are closed

    def mark_stale(self) -> None:
        """Send every variable again before the next step: a step has failed, or tower 0 has loaded values."""
        if not self._session.layout.meets_processes:  # else they are added up when they are sent, by all processes
            self.add_up_parts()
        self._pending.keys.update(self._held)

    def send_unused(self, variables: Sequence[tf.Variable]) -> None:
        """Send tower 0's values of variables without copies, which no step has used, to all processes. Collective."""
        session, is_chief = self._session, self._session.layout.is_chief
        unused = [variable for variable in variables if id(variable) not in self._held]
        own = [variable.numpy() for variable in unused] if is_chief else None
        values = session.communicator.exchange(own, "variables that no step has used")[0]
        if not is_chief:
            for variable, value in zip(unused, values, strict=True):
                variable.assign(value)

    def add_up_parts(self) -> None:
        """Let the first tower of each process hold the whole of variables that towers hold parts of. Collective."""
        for held in list(self._held.values()):
            held.gather_parts()
        if self._session.layout.meets_processes and self.sharding is not None:
            self.sharding.make_whole()

    def forget_shards(self) -> None:
        """Drop the copies that belong to shards: their number is about to change."""
        for key, held in list(self._held.items()):
            if held.role is not Role.SAME:
                self._forget_copies(key)

    def close(self) -> None:
        """Free the other towers' copies."""
        for held in list(self._held.values()):
            held.untrack()
            self.left.forget(held.slot)
        self._held.clear()
        self._pending.keys.clear()
        self.shared.clear()

    def send(self, keys: Sequence[int] | None = None) -> None:
        """Send tower 0's values of the variables with these ids; None: of all.

        A variable stays pending until its value has arrived. Where several processes enqueue their broadcasts, none
        writes a value before all of them have launched all broadcasts.
        """
        with self._sending:
            self._send(list(self._held) if keys is None else keys)

    def _send(self, keys: Sequence[int]) -> None:
        meets, is_chief = self._session.layout.meets_processes, self._session.layout.is_chief
        agrees, arriving = self._session.launches and meets, []
        sent: list[tuple[Copies, tf.Tensor]] = []
        for key in keys:
            held = self._held[key]
            if (not held.copies and not meets) or held.role in (Role.PARTIAL, Role.PARTITION):
                # Its holders, these `Towers` or others, add up their parts when it is read.
                held.variable.value()
                held.keep_part(is_chief)
                self._pending.keys.discard(key)
                continue
            self._pending.keys.add(key)
            value = self._value_of(held.variable)
            # Freed before its successor is made: a variable's copies never take memory twice, unless a step that runs
            # in another thread may read them.
            for copy in held.copies if not self._pending.is_read_elsewhere() else ():
                with tf.device(copy.device):
                    tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(copy), value=tf.zeros([0], copy.dtype))
            copies = [held.variable, *held.copies]
            for place, one in self._values(held.variable, held.role, value):
                if agrees:
                    arriving.append((copies[place], one))
                else:
                    tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(copies[place]), value=one)
                value = one if place == 0 else value
            sent.append((held, value))
        if agrees:
            self._session.communicator.agree(None, "the sending of variables")
        for variable, one in arriving:
            tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(variable), value=one)
        self._hold(sent)
        self._pending.keys.difference_update(id(held.variable) for held, _ in sent)

    def watched(self, variables: Sequence[tf.Variable]) -> dict[str, list[tuple[tf.Variable, int]]]:
        """Return, by device, which variables nobody but a step that has these may write, and their slots in `left`.

        These are the variables whose copies follow from tower 0's alone, and those that are divided among the towers.
        """
        meets = self._session.layout.meets_processes
        holders = [(one, self._held[id(one)]) for one in variables]
        pairs = [(one, held.slot) for one, held in holders if held.role in _WATCHED and (held.copies or meets)]
        if self.sharding is not None:
            pairs += self.sharding.watched({id(one) for one in variables})
        found: dict[str, list[tuple[tf.Variable, int]]] = {}
        for variable, slot in pairs:
            found.setdefault(variable.device, []).append((variable, slot))
        return found

    @contextlib.contextmanager
    def under_way(self, written: frozenset[int], python: str = "") -> Iterator[None]:
        """Run a step, which writes the variables with these ids, in the body; `python`: a line of Python that it runs.

        If somebody else writes a variable meanwhile, towers may have computed with different values: all that the step
        has written is sent before the next one.
        """
        stale, thread = self._pending, threading.get_ident()
        with self._sending:  # no step begins while copies are sent, which may be empty meanwhile
            stale.running.append(thread)
        try:
            yield
        finally:
            with self._sending:
                stale.disturbed |= self.left.take_disturbed()
                if stale.disturbed:
                    stale.keys |= written & self._held.keys()
                    if python:
                        self._session.warn_once(
                            f"{python}, or a thread, wrote a variable while a step ran: some towers may have computed "
                            "with its old value. All go on from tower 0's state. Write variables by ops of the step, "
                            "or between steps"
                        )
                stale.running.remove(thread)
                stale.disturbed &= bool(stale.running)

    def send_changed(self) -> None:
        """Send the variables of which `left` knows no value, since others have written them."""
        if self.sharding is not None:
            self.sharding.take_changed()
        self.send(self._changed)

    @property
    def _changed(self) -> list[int]:
        """Return the ids of the variables of which `left` knows no value."""
        kept = list(self._held.items())
        return [key for key, held in kept if held.role in _WATCHED and not self.left.knows(held.slot)]

    def _compare(self) -> None:
        """Mark the variables as stale that others than steps on these towers have written."""
        for pairs in self.watched(self.variables).values():
            held_ops.let_go_of_written(self.left, *zip(*pairs, strict=True))
        self._pending.keys.update(self._changed)
        if self.sharding is not None:
            self.sharding.take_changed()

    def _hold(self, sent: Sequence[tuple[Copies, tf.Tensor]]) -> None:
        """Hold the values of tower 0's variables that their copies have been given."""
        by_device: dict[str, list[tuple[tf.Tensor, int]]] = {}
        for held, value in sent:
            if held.role in _WATCHED:
                by_device.setdefault(held.variable.device, []).append((value, held.slot))
        for device, pairs in by_device.items():
            values, slots = zip(*pairs, strict=True)
            held_ops.hold(self.left, values, slots, [True] * len(slots), begins=False, device=device)

    def _value_of(self, variable: tf.Variable) -> tf.Tensor:
        """Return what a variable of tower 0 holds, in the variable's own memory."""
        with tf.device(variable.device):  # after a sparse write its readers get copies
            tf.raw_ops.DisableCopyOnRead(resource=tf_compat.handle_of(variable))
        return variable.value()

    def _values(self, variable: tf.Variable, role: Role, value: tf.Tensor) -> Iterator[tuple[int, tf.Tensor]]:
        """Yield (place, value) for each of this process' towers but tower 0, from tower 0's value.

        Equal values are broadcast into fresh tensors, which the copies then own: no staging buffer.
        """
        session, meets = self._session, self._session.layout.meets_processes
        _, ranks = self._holders(role)
        if len(ranks) == 1 and not meets:
            return
        session.communicator.reopen()
        name = variable.name if meets else ""
        if role is not Role.SAME or not self.lies_where_joined(variable):
            if role in (Role.SAME, Role.SEED):
                value = session.of_tower_0(variable, name)
            for place, rank in enumerate(ranks):
                # Each process' first tower holds a metric's sum between steps; see `Rollback`.
                if rank > 0 and (place > 0 or role is not Role.SUM):
                    yield place, start_value(value, role, rank)
            return
        buffers: list[tf.Tensor] = []
        for place in range(len(ranks)):
            with tf.device(self._device_of(variable, place)), tf_compat.unobserved():
                # Tower 0's value is no copy, unless other towers have their tower 0 elsewhere.
                fresh = buffers or ranks[0] > 0
                shape = tf.constant(value.shape.as_list(), tf.int32)
                buffers.append(tf.raw_ops.Empty(shape=shape, dtype=value.dtype) if fresh else tf.identity(value))
        if session.launches:
            buffers = session.broadcast(buffers, "a variable", in_place=True)
        else:
            session.communicator.broadcast(buffers, 0, label=name)
        yield from itertools.islice(enumerate(buffers), 1 if ranks[0] == 0 else 0, None)

    def saved(self, variable: tf.Variable) -> tf.Variable:
        """Return a variable in which steps save the value of a tower's variable: the same for all programs.

        It lives as long as somebody holds it, who holds `variable`, too.
        """
        saved = self._saved.get(id(variable))
        if saved is None:
            saved = tf.Variable(variable.value(), trainable=False, shape=variable.shape)  # which may be open
            self._saved[id(variable)] = saved
        return saved

    def _holders(self, role: Role) -> tuple[Sequence[str], range]:
        """Return the devices and numbers of the towers, or shards, that have a copy of a variable of this role."""
        layout = self._session.layout
        return (layout.devices, layout.ranks) if role is Role.SAME else (layout.shard_devices, layout.own_shards)

    def _device_of(self, variable: tf.Variable, place: int, role: Role = Role.SAME) -> str:
        """Return the device of a tower's copy: the tower's, unless the user keeps tower 0's on the CPU."""
        device = self._holders(role)[0][place]
        return variable.device if is_cpu(variable.device) and not is_cpu(device) else f"/{device}"

    def _forget_copies(self, key: int) -> None:
        """Drop a variable's copies; tower 0 alone holds it until copies are made again."""
        held = self._held.pop(key)
        held.gather_parts()
        held.untrack()
        self.left.forget(held.slot)
        self._pending.keys.discard(key)

    def _names_of_lost(self) -> str:
        lost = [self._held[key].variable for key in self._session.failures.lost if key in self._held]
        names = ", ".join(self._session.names_of(lost)[:_NAMED])
        return names + (f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else "")


def _forget(borrowed: "weakref.ref[Replicas]", key: int) -> None:
    """Let replicas, if they still exist, free the copies of a variable that was deleted."""
    replicas = borrowed()
    if replicas is not None:
        held = replicas._held.pop(key, None)
        if held is not None:
            replicas.left.forget(held.slot)
        replicas._pending.keys.discard(key)
        replicas._session.failures.replaced(key)  # another variable, written by no step, may get its id
        replicas.shared.discard(key)
