"""`compression.method = "auto"`: measured once in a run's life, then kept; newcomers learn it from the group."""

from __future__ import annotations

from dataclasses import asdict

import torch

from everstep.actors.notebook import Notebook
from everstep.compressors import Compressor
from everstep.storage.chain import Chain
from everstep.training.exchange import Exchange
from everstep.training.group import Group
from everstep.training.worth import measure

EVENT = "compression-auto"


class Auto:
    """A worker's part in the decision.

    Args:
        chain: where it may stand already.
        notebook: writes it down.
    """

    def __init__(self, chain: Chain, notebook: Notebook) -> None:
        found = chain.events(EVENT).get(EVENT)
        self.pays: bool | None = None if found is None else bool(found["pays"])
        self.notebook = notebook

    def decide(self, group: Group, exchange: Exchange, device: torch.device) -> str:
        """Agree with the group, measuring if nobody knows yet; return what a person should know.

        Raises:
            Interruption: the group broke.
        """
        mine = torch.tensor([-1 if self.pays is None else int(self.pays)], device=device)
        known, note = max(int(other) for other in group.all_gather(mine)), ""
        if known < 0:
            assert isinstance(exchange.compressor, Compressor)
            worth = measure(exchange.compressor, exchange.layout.size, group, device)
            known, note = int(worth.pays), str(worth)
            if group.world_rank == 0:
                self.notebook.event(EVENT, {"pays": worth.pays, **asdict(worth)})
        self.pays = bool(known)
        if not self.pays and exchange.compressor is not None:
            exchange.send_all()
        return note
