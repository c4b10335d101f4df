"""A discrete-event simulation of all-reduces and of a training step: every chunk on every port.

A port sends, or receives, one message at a time, for its size over the bandwidth; a message goes through
the sender's port and, while that sends it, the receiver's, and arrives the link's latency after its last
byte. The flows that share a port take turns, as the channels of NCCL do. Knows nothing of closed forms: it is
what they are checked against.
"""

import collections
import heapq
import itertools


class Simulator:
    """Events in the order of time."""

    def __init__(self):
        self.now = 0.0
        self._events = []
        self._order = itertools.count()
        self._ports = collections.defaultdict(lambda: Port(self))

    def at(self, time, do):
        heapq.heappush(self._events, (time, next(self._order), do))

    def send(self, flow, ports, link, size_bytes, arrived):
        """Let a message through the ports of the sender and the receiver; call `arrived` at its end."""
        out, into = (self._ports[port] for port in ports)
        seconds = size_bytes / link.bandwidth

        def received():
            self.at(self.now + link.latency_s, arrived)

        out.serve(flow, seconds, begun=lambda: into.serve(flow, seconds, done=received))

    def run(self):
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()
        return self.now


class Port:
    """Serves one message at a time; its flows take turns, each in the order of asking."""

    def __init__(self, simulator):
        self._simulator = simulator
        self._waiting = collections.OrderedDict()
        self._busy = False

    def serve(self, flow, seconds, begun=lambda: None, done=lambda: None):
        self._waiting.setdefault(flow, collections.deque()).append((seconds, begun, done))
        self._next()

    def _next(self):
        if self._busy or not self._waiting:
            return
        self._busy = True
        flow, queue = self._waiting.popitem(last=False)
        seconds, begun, done = queue.popleft()
        if queue:
            self._waiting[flow] = queue  # behind the others

        def end():
            self._busy = False
            done()
            self._next()

        begun()
        self._simulator.at(self._simulator.now + seconds, end)


def _hop(sender, receiver, cluster):
    """(ports, link) from one GPU to another: of the GPUs within a host, of the hosts between them."""
    homes = sender // cluster.gpus_per_host, receiver // cluster.gpus_per_host
    if homes[0] == homes[1]:
        return (("gpu out", sender), ("gpu in", receiver)), cluster.within
    return (("host out", homes[0]), ("host in", homes[1])), cluster.between


def ring_all_reduce(size_bytes, gpus, cluster):
    """Seconds until every GPU has every reduced chunk: 2(n-1) steps, each of a chunk to the next GPU."""
    simulator = Simulator()
    received = [0] * gpus

    def send(gpu, step):
        if step == 2 * (gpus - 1):
            return
        target = (gpu + 1) % gpus

        def arrived():
            received[target] += 1
            send(target, step + 1)

        simulator.send("ring", *_hop(gpu, target, cluster), size_bytes / gpus, arrived)

    for gpu in range(gpus):
        send(gpu, 0)
    seconds = simulator.run()
    assert received == [2 * (gpus - 1)] * gpus
    return seconds


def binary_tree(hosts):
    """{host: parent} of an in-order binary tree, in which odd hosts are leaves; host 0 is the root.

    Source: as in Sanders, Speck and Träff, 2009, section 2: numbered in-order, so that a shift by one makes
    a second tree whose inner nodes are the first one's leaves.
    """
    parents = {}
    for host in range(1, hosts):
        bit = host & -host
        up = (host ^ bit) | (bit << 1)
        parents[host] = up if up < hosts else host ^ bit
    return parents


def double_tree(hosts):
    """The parents in both trees: the second is the first with its hosts shifted by one, or mirrored."""
    first = binary_tree(hosts)
    if hosts % 2:
        return [first, {(h + 1) % hosts: (p + 1) % hosts for h, p in first.items()}]
    return [first, {hosts - 1 - h: hosts - 1 - p for h, p in first.items()}]


def tree_all_reduce(size_bytes, gpus, cluster, chunk_bytes):
    """Seconds until every GPU has every reduced chunk: up and down both trees, a chain in each host."""
    simulator = Simulator()
    per_host = cluster.gpus_per_host
    trees = []
    for parents in double_tree(-(-gpus // per_host)):
        # A host's first GPU joins the trees; the others hang on it as a chain.
        tree = {host * per_host: parent * per_host for host, parent in parents.items()}
        tree |= {gpu: gpu - 1 for gpu in range(gpus) if gpu % per_host}
        trees.append(tree)
    chunks = max(1, round(size_bytes / 2 / chunk_bytes))
    finished = collections.Counter()

    def start(tree, parents):
        children = collections.defaultdict(list)
        for child, parent in parents.items():
            children[parent].append(child)
        waiting = {(g, c): len(children[g]) for g in range(gpus) for c in range(chunks)}

        def send(sender, receiver, arrived):
            flow = tree, sender, receiver
            simulator.send(flow, *_hop(sender, receiver, cluster), size_bytes / 2 / chunks, arrived)

        def reduced(gpu, chunk):  # of this GPU and all below it
            if gpu in parents:
                send(gpu, parents[gpu], lambda: joined(parents[gpu], chunk))
            else:
                complete(gpu, chunk)

        def joined(gpu, chunk):
            waiting[gpu, chunk] -= 1
            if waiting[gpu, chunk] == 0:
                reduced(gpu, chunk)

        def complete(gpu, chunk):
            finished[gpu] += 1
            for child in children[gpu]:
                send(gpu, child, lambda child=child: complete(child, chunk))

        for chunk in range(chunks):
            for gpu in range(gpus):
                if not children[gpu]:
                    reduced(gpu, chunk)

    for tree, parents in enumerate(trees):
        start(tree, parents)
    seconds = simulator.run()
    assert finished == dict.fromkeys(range(gpus), 2 * chunks)
    return seconds


def step(stages, layers=1000):
    """Seconds of a step: a device that computes in small layers, and one channel that serves in order.

    Args:
        stages: [(seconds of compute, [(share of the compute after which it is ready, seconds)])].
        layers: pieces of a stage's compute.
    """
    simulator = Simulator()
    channel = collections.deque()
    busy = [False]

    def serve():
        if channel and not busy[0] and channel[0][0]:
            busy[0] = True
            _, seconds, done = channel.popleft()
            simulator.at(simulator.now + seconds, lambda: finished(done))

    def finished(done):
        busy[0] = False
        done()
        serve()

    def run_stage(index):
        if index == len(stages):
            return
        compute_s, messages = stages[index]
        left = [1 + len(messages)]
        tickets = [[False, seconds, lambda: part_done()] for _, seconds in messages]
        channel.extend(tickets)

        def part_done():
            left[0] -= 1
            if left[0] == 0:
                run_stage(index + 1)

        def layer(done):
            for ticket, (ready, _) in zip(tickets, messages, strict=True):
                if not ticket[0] and done >= round(ready * layers):
                    ticket[0] = True
            serve()
            if done < layers:
                simulator.at(simulator.now + compute_s / layers, lambda: layer(done + 1))
            else:
                part_done()

        layer(0)

    run_stage(0)
    return simulator.run()
