// Package kube answers one question: which objects of a kind does a Kubernetes API server have now?
//
//	client, err := kube.New(kube.Config{})                       // in a pod
//	pods := kube.NewCopy[kube.Pod](client, kube.Pods("", "app=vllm"), nil)
//	go pods.Run(ctx)
//	list, err := pods.List()
//
// A [Copy] lists a collection and watches it, as client-go's Reflector does: pages of 500, bookmarks, a new list after
// 410 Gone, pauses that grow. If the API server does not answer, the last copy stays valid and Failed reports why. A
// [Membership] divides work among the replicas of a Deployment by Leases.
//
// DESIGN.md gives the reason for not using client-go.
package kube
