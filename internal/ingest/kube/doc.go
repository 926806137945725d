// Package kube keeps a copy of a Kubernetes API server's objects of one kind.
//
//	client, err := kube.New(kube.Config{})                       // in a pod
//	pods := kube.NewCopy[kube.Pod](client, kube.Pods("", "app=vllm"), nil)
//	go pods.Run(ctx)
//	list, err := pods.List()
//
// A [Copy] lists a collection and watches it, as client-go's Reflector does: pages of 500, bookmarks, a new list after
// 410 Gone, growing pauses. If the API server does not answer, the last copy stays valid and the failed callback
// receives the reason. A [Membership] divides work among the replicas of a Deployment by Leases.
//
// DESIGN.md gives the reason for not using client-go.
package kube
