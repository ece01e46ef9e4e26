"""What to do about a card that does not pass: one sentence with a command. Torch-free."""

from __future__ import annotations

from lockstep.check.outcome import CardVerdict, Checked, Status

NEEDED_FOR_A_MAJORITY = 3


def advice(verdict: CardVerdict, checked: Checked, *, failed: bool = False) -> str:
    """`failed`: its process died or was ended. Of a PASS nothing."""
    if verdict.status is Status.PASS:
        return ""
    if verdict.status is Status.UNDECIDED:
        return _for_a_tie(checked)
    if verdict.difference:
        return _for_wrong_bits(verdict, checked)
    if checked.device != "cuda":
        return f"look at its output in the folder of the check, then {_again(checked, '')}"
    index = verdict.card.index
    if failed:
        return f"look at its output in the folder of the check, then nvidia-smi -q -i {index}"
    if any(pace.slow for pace in verdict.paces):
        return f"nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER -i {index}"
    return f"nvidia-smi -q -i {index}"


def _for_wrong_bits(verdict: CardVerdict, checked: Checked) -> str:
    assert verdict.difference
    passed = any(each.status is Status.PASS for each in checked.judgement.verdicts)
    if checked.golden.get("state") == "used" and not passed:
        return (
            f"were the bits in {checked.golden.get('file')} made on a machine you trust? If you do not know, "
            f"{_again(checked, '--golden ANOTHER')} writes new ones"
        )
    if verdict.difference.nature == "transient":
        return f"it did not happen again, which does not clear it: {_again(checked)}"
    healthy = [each.card.index for each in checked.judgement.verdicts if each.status is Status.PASS]
    same_node = all(each.card.node == verdict.card.node for each in checked.judgement.verdicts)
    if checked.device == "cuda" and same_node and healthy:
        return f"train without it (--gpus {','.join(map(str, sorted(set(healthy))))}) and have it looked at"
    return f"train without it and have it looked at; to be surer, {_again(checked)}"


def _for_a_tie(checked: Checked) -> str:
    if len(checked.judgement.verdicts) < NEEDED_FOR_A_MAJORITY:
        return f"three cards can outvote one, and so can a file of known bits: {_again(checked, '--golden FILE')}"
    return f"known bits of a machine you trust can decide: {_again(checked, '--golden FILE')}"


def _again(checked: Checked, flags: str = "--deep") -> str:
    workers = f"--device cpu --gpus {max(NEEDED_FOR_A_MAJORITY, len(checked.judgement.verdicts))}"
    return " ".join(word for word in ("lockstep check", workers if checked.device == "cpu" else "", flags) if word)
