// Package doctor answers one question: what is wrong with a deployment, and which flag or command mends it?
//
// [Examine] runs the checks one after the other. A check gathers facts ([Facts]) and judges them; judging needs no
// network and no clock. What is found is a [Finding]: what, where, the evidence, and the remedy. A check that could not
// look, as the NATS user may not ask, is not the same as one that found nothing: see [Result].
//
// It reads only. Nothing is written to streams or buckets, and no shim or engine is told anything.
package doctor
