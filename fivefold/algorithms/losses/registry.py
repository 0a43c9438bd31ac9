"""The policy losses by the name that `actor.loss` gives them, and how one is made from a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.algorithms.losses.cispo import CISPO
from fivefold.algorithms.losses.clip_cov import ClipCov
from fivefold.algorithms.losses.cpgd import CPGD
from fivefold.algorithms.losses.dppo import DPPOKL, DPPOTV
from fivefold.algorithms.losses.gmpo import GMPO
from fivefold.algorithms.losses.gspo import GSPO
from fivefold.algorithms.losses.kimi import Kimi
from fivefold.algorithms.losses.kl_cov import KLCov
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.losses.rec import REC
from fivefold.algorithms.losses.reinforce import Reinforce
from fivefold.algorithms.losses.sapo import SAPO
from fivefold.algorithms.losses.surrogate import Surrogate
from fivefold.algorithms.losses.topr import TOPR
from fivefold.algorithms.user_method import UserLoss, load
from fivefold.config.options import built_in, options
from fivefold.config.schema.roles import ActorConfig

LOSSES: Mapping[str, type[Surrogate]] = {
    "ppo": PPO,
    "reinforce": Reinforce,
    "gspo": GSPO,
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "topr": TOPR,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "kimi": Kimi,
    "cpgd": CPGD,
    "dppo_tv": DPPOTV,
    "dppo_kl": DPPOKL,
    "rec": REC,
}


def build_surrogate(config: ActorConfig) -> Surrogate:
    """Return the loss that `actor.loss` names, with the actor's keys and `actor.loss_kwargs` as its options.

    Raises:
        ValueError: a user's class that cannot be imported, or options that the loss does not take.
    """
    if config.loss in LOSSES:
        kind = LOSSES[config.loss]
        return built_in("actor.loss", config.loss, kind, options("actor.loss", kind, config, config.loss_kwargs))
    chosen = options("actor.loss", load("actor.loss", config.loss), config, config.loss_kwargs)
    return UserLoss.of(config.loss, chosen)
