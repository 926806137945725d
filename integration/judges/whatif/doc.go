// Package whatif compares predictions from recorded traffic with real changes of a fleet: three nodes and eight
// simulated engines. The steps of the engines have a real duration.
package whatif
