package rpc

import (
	"sync/atomic"
	"time"
)

// Limits of a [Budget].
const (
	HedgeRatio = 10  // one hedged request for every 10 other requests
	HedgeBurst = 100 // hedged requests at once after a time without hedging
	HedgeRate  = 10  // hedged requests per second in any case
)

// earnEvery is the time that earns as much as a request that is not hedged.
const earnEvery = time.Second / (HedgeRate * HedgeRatio)

// Budget bounds hedged requests. A hedged request repeats a request while a reply to the first may still arrive. The
// zero value is full. A Budget is safe for concurrent use.
//
// Requests and time fill a budget. Requests alone are not enough: if all callers wait for a lost reply, then no request
// follows, and all of them would wait until their deadlines. Finagle's RetryBudget has the same two sources.
type Budget struct {
	Now func() time.Time // nil: time.Now

	debt   atomic.Int64 // HedgeRatio times the hedged requests that neither a request nor time has earned
	filled atomic.Int64 // time of the last reduction of the debt by time, in earnEvery since 1970
}

// Earn adds a request that is not hedged to the budget.
func (b *Budget) Earn() { b.earn(1) }

func (b *Budget) earn(n int64) {
	for {
		debt := b.debt.Load()
		if debt == 0 || b.debt.CompareAndSwap(debt, max(0, debt-n)) {
			return
		}
	}
}

// Spend removes a hedged request from the budget. Spend returns false if the budget is empty.
func (b *Budget) Spend() bool {
	now := time.Now
	if b.Now != nil {
		now = b.Now
	}
	at := now().UnixNano() / int64(earnEvery)
	if filled := b.filled.Load(); at != filled && b.filled.CompareAndSwap(filled, at) {
		b.earn(max(0, at-filled)) // nothing after a step of the clock into the past
	}
	for {
		debt := b.debt.Load()
		if debt+HedgeRatio > HedgeBurst*HedgeRatio {
			return false
		}
		if b.debt.CompareAndSwap(debt, debt+HedgeRatio) {
			return true
		}
	}
}
