"""How many workers should train, and when some join or leave. Pure; time is among the facts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep.platform.states import Ask, Decision, Facts, Pause, Prepare, Regroup, Wait, WorkerFacts

WORTH_S = 30.0  # a worker that begins to be made now takes its first step about so much later, at best
LAST_CALL_S = 15.0  # so long before its node is taken away a worker leaves, even if nobody has come in its place


@dataclass(frozen=True)
class ScalingPolicy:
    """Ask for workers while they make the run faster; take them in, and let them go, at borders.

    Args:
        least: below it the run waits.
        most: it asks for no more.
        spares: workers that wait besides, built.
        micro_shards: of a step; shared out as evenly as whole ones can be.
    """

    least: int
    most: int
    spares: int
    micro_shards: int

    @property
    def target(self) -> int:
        """The smallest size at which the busiest worker has as few micro-shards as with `most` workers."""
        share = -(-self.micro_shards // min(self.most, self.micro_shards))
        return max(self.least, -(-self.micro_shards // share))

    def decide(self, facts: Facts) -> Decision:
        """Return what to do now that nothing is wrong."""
        if facts.pausing or facts.stop_asked or any(worker.outcome is not None for worker in facts.workers):
            return Wait("the group is on its way to a border, or at one")
        leaving = leavers(facts)
        stay = len(facts.workers) - len(leaving)
        return (
            self._leave(facts, leaving, stay)
            or self._shrink(stay)
            or self._grow(facts, stay)
            or self._ask(facts, stay)
            or Wait()
        )

    def placed(self, decision: Regroup, facts: Facts) -> Regroup:
        """Return the decision with who leaves and how many there may be then."""
        alive = [w for w in facts.workers if w.outcome != "dead" and w.identity not in decision.kill]
        leaving = [worker for worker in leavers(facts) if worker in alive]
        covered = len(alive) - len(leaving) + facts.newcomers.built >= self.least
        pressing = decision.kind == "resize" or covered
        gone = leaving if pressing else []
        staying = [worker for worker in alive if worker not in gone]
        gone = gone + staying[self.target :]  # too many: the highest world ranks go
        return replace(decision, leave=tuple(worker.identity for worker in gone), size=self.target)

    def _leave(self, facts: Facts, leaving: list[WorkerFacts], stay: int) -> Decision | None:
        if not leaving:
            return None
        soonest = min(worker.leaves_s or 0.0 for worker in leaving)
        if stay + facts.newcomers.ready < self.least and soonest > LAST_CALL_S:
            return None  # whoever takes the place is asked for, and comes in time, or does not
        ranks = ", ".join(str(worker.world_rank) for worker in leaving)
        return Pause(f"the node of world rank {ranks} is being taken away: it leaves at the next border")

    def _shrink(self, stay: int) -> Decision | None:
        if stay <= self.target:
            return None
        return Pause(f"no more than {self.target} are to train: {stay} -> {self.target} at the next border")

    def _grow(self, facts: Facts, stay: int) -> Decision | None:
        new, wanted = facts.newcomers, self.target - stay
        if wanted <= 0:
            return None
        if new.ready and stay == len(facts.workers):
            joining = min(new.ready, wanted)
            return Pause(f"{joining} more can train: {stay} -> {stay + joining} at the next border")
        idle = new.built - new.preparing - new.ready
        count = min(idle, wanted - new.preparing - new.ready)
        return Prepare(f"{count} of the newcomers catch up with the group", count) if count > 0 else None

    def _ask(self, facts: Facts, stay: int) -> Decision | None:
        missing = max(self.target - stay, 0)
        late = facts.left_s is not None and facts.left_s < WORTH_S
        if late and stay >= self.least:
            missing = min(missing, max(facts.newcomers.asked - self.spares, 0))  # none more; who is there may come
        count, has = missing + self.spares, facts.newcomers.asked
        if count == has:
            return None
        what = f"{missing} to train beside {stay}, {self.spares} to wait"
        return Ask(f"{'asking Ray for' if count > has else 'giving back'} {abs(count - has)} workers ({what})", count)


def leavers(facts: Facts) -> list[WorkerFacts]:
    """Return the members whose nodes are about to be taken away."""
    return [worker for worker in facts.workers if worker.leaves_s is not None]
