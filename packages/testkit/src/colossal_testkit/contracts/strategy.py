from __future__ import annotations

from colossal_testkit.contracts.protection import Contract


class StrategyContract(Contract, is_contract=True):
    pass
