"""Fair shares of the computed tokens: one account per API key, or per request without keys.

The waiting queue and the prefill queue share the accounts of a priority. Slots are given in the
order of start tags (``turn``), as in start-time fair queueing (Goyal and others, SIGCOMM 1996);
prompts of admitted sequences are ordered by the time at which they would be finished if all
accounts were computed at the same speed (``prefill_queue.PrefillQueue``), as in weighted fair
queueing (Demers and others, SIGCOMM 1989) and in the fair sojourn protocol (Friedman and Henderson,
SIGMETRICS 2003): no prompt is finished later than if prompts were computed side by side, and most
are finished sooner.
"""

from bisect import insort
from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    """``tag``: its virtual time after the tokens computed so far."""

    tag: int
    num_waiting: int = 0  # sequences without a slot
    # admitted sequences with prompt tokens to compute
    num_prefilling: int = 0
    num_claimed: int = 0  # the prompt tokens that these have left to compute

    @property
    def is_active(self) -> bool:
        return bool(self.num_waiting or self.num_prefilling)


class FairShares:
    """The accounts of one priority, and its virtual time.

    An account is charged each token when it is scheduled: prompt tokens and, with API keys, output
    tokens. Cached tokens and rejected drafts are free. ``turn`` also counts claimed tokens (of
    admitted prompts, not computed yet), so that one account does not take all slots between two
    micro-batches. No token counts twice: a computed token is no longer claimed.

    Virtual time advances by one per n prompt tokens, where n accounts would be computed at once in
    equal shares: the accounts with admitted prompts, and the accounts that have been computed ahead
    of their shares. An account without prompts begins again at the virtual time, so idle time earns
    no credit; an account that has been charged more since then stays behind. When no sequence waits
    or has prompt tokens left, all accounts are equal again.

    A and B have long prompts, and 100 tokens of A are computed: A is at 100, B at 0, the virtual
    time at 50. C comes with 4 tokens, begins at 50 and would be finished at 54, before A and B.
    """

    def __init__(self) -> None:
        # accounts with waiting sequences whose ``turn`` has become lower
        self.lowered: set[int] = set()
        self._accounts: dict[int, _Account] = {}
        # virtual time, and its value when the first of the active accounts came
        self._now = self._began = 0
        self._rest = 0  # computed tokens that have not advanced the virtual time yet
        # tag and number of accounts without admitted prompts that are ahead of the virtual time, in
        # order
        self._ahead: list[tuple[int, int]] = []
        self._num_active = self._num_prefilling = 0  # accounts

    @property
    def is_contended(self) -> bool:
        """Whether several accounts have prompts to be computed."""
        return self._num_active > 1

    def tag(self, number: int) -> int:
        """Return the virtual time of an active account."""
        return self._accounts[number].tag

    def turn(self, number: int) -> int:
        """Return the virtual time that an active account will have once its admitted prompts are
        computed: the lowest gets the next slot.
        """
        account = self._accounts[number]
        return account.tag + account.num_claimed

    def wait(self, number: int) -> None:
        """Count a sequence that waits for a slot."""
        self._open(number).num_waiting += 1

    def stop_waiting(self, number: int) -> None:
        """Remove a waiting sequence from the count."""
        account = self._accounts[number]
        account.num_waiting -= 1
        self._close(number, account)

    def begin(self, number: int, num_tokens: int) -> int:
        """Claim ``num_tokens`` prompt tokens of an admitted sequence; return when they are due
        within the account.

        Shorter prompts that the account adds later are computed first, until as many of its tokens
        have been computed.
        """
        account = self._open(number)
        if not account.num_prefilling:
            self._leave_ahead(number, account)
            account.tag = max(account.tag, self._now)
            self._num_prefilling += 1
        account.num_prefilling += 1
        account.num_claimed += num_tokens
        return account.tag + num_tokens

    def adjust(self, number: int, num_tokens: int) -> None:
        """Adjust the claimed tokens: more or fewer tokens of a prompt are cached than expected."""
        self._accounts[number].num_claimed += num_tokens
        self._note_lowered(number, num_tokens)

    def compute(self, number: int, num_tokens: int) -> None:
        """Charge claimed prompt tokens."""
        account = self._accounts[number]
        account.num_claimed -= num_tokens
        account.tag += num_tokens
        self._advance(num_tokens)

    def end(self, number: int, num_left: int) -> None:
        """End the prompt of an admitted sequence; ``num_left`` of its claimed tokens were not
        computed.
        """
        account = self._accounts[number]
        account.num_prefilling -= 1
        account.num_claimed -= num_left
        self._note_lowered(number, -num_left)
        if not account.num_prefilling:
            self._num_prefilling -= 1
            self._enter_ahead(number, account)
        self._close(number, account)

    def charge_decodes(self, number: int, num_tokens: int) -> None:
        """Charge output tokens, which take no turn."""
        account = self._accounts.setdefault(number, _Account(self._began))
        if account.num_prefilling:
            account.tag += num_tokens
        else:
            self._leave_ahead(number, account)
            account.tag += num_tokens
            self._enter_ahead(number, account)

    def _note_lowered(self, number: int, change: int) -> None:
        if change < 0 and self._accounts[number].num_waiting:
            self.lowered.add(number)

    def check_integrity(self) -> None:
        """Assert that the counts are right."""
        accounts = self._accounts
        assert self._num_active == sum(account.is_active for account in accounts.values())
        assert self._num_prefilling == sum(
            account.num_prefilling > 0 for account in accounts.values()
        )
        assert all(
            min(a.num_waiting, a.num_prefilling, a.num_claimed) >= 0 for a in accounts.values()
        )
        assert all(
            account.num_prefilling or not account.num_claimed for account in accounts.values()
        )
        assert self._ahead == sorted(self._ahead)
        ahead = {number for tag, number in self._ahead if tag > self._now}
        assert ahead == {
            n for n, a in accounts.items() if a.tag > self._now and not a.num_prefilling
        }
        assert all(
            account.is_active or number > 0 or number in ahead
            for number, account in accounts.items()
        )

    def _open(self, number: int) -> _Account:
        """Return an account that is active, or is about to be."""
        account = self._accounts.get(number)
        if account is not None and account.is_active:
            return account
        if not self._num_active:
            self._accounts.clear()
            self._ahead.clear()
            self._began, account = self._now, None
        elif number > 0:  # decodes may have advanced all active keys past the virtual time
            self._now = max(
                self._now, min(each.tag for each in self._accounts.values() if each.is_active)
            )
            self._drop_reached()
        if account is None:
            account = self._accounts[number] = _Account(self._now)
        account.tag = max(account.tag, self._now)
        self._num_active += 1
        return account

    def _close(self, number: int, account: _Account) -> None:
        if not account.is_active:
            self._num_active -= 1
            if number < 0 and account.tag <= self._now:
                del self._accounts[number]

    def _enter_ahead(self, number: int, account: _Account) -> None:
        if account.tag > self._now:
            insort(self._ahead, (account.tag, number))

    def _leave_ahead(self, number: int, account: _Account) -> None:
        if account.tag > self._now:
            self._ahead.remove((account.tag, number))

    def _advance(self, num_tokens: int) -> None:
        """Advance the virtual time. Two accounts with prompts, one 10 ahead: 45 tokens are 10 for
        three, 7 for two, 1 left.
        """
        left = self._rest + num_tokens
        while num_sharing := self._num_prefilling + len(self._ahead):
            step = left // num_sharing
            if self._ahead:
                step = min(step, self._ahead[0][0] - self._now)
            if not step:
                break
            self._now += step
            left -= step * num_sharing
            self._drop_reached()
        self._rest = left

    def _drop_reached(self) -> None:
        """Remove the records of accounts that were ahead up to the virtual time; for requests that
        have left, all records.
        """
        while self._ahead and self._ahead[0][0] <= self._now:
            _, number = self._ahead.pop(0)
            if number < 0 and not self._accounts[number].is_active:
                del self._accounts[number]
