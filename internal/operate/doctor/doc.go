// Package doctor examines a deployment and reports the faults, with the flag or command to correct every fault.
//
// [Examine] runs the checks in order. A check gathers facts ([Facts]) and judges them. The judgement uses no network
// and no clock. Each fault is a [Finding]: the event, the place, the evidence, and the remedy. A failed check, for
// example because of missing permissions of the NATS user, differs from a check without findings: see [Result].
//
// The package only reads. It writes to no stream or bucket, and sends no commands to shims or engines.
package doctor
