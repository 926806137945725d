// Package externalmetrics serves the API external.metrics.k8s.io/v1beta1 of Kubernetes: the waiting work of models, for
// a HorizontalPodAutoscaler.
//
//	config := externalmetrics.Secure(serving, authorities, []string{"front-proxy-client"})
//	handler := externalmetrics.Handler(externalmetrics.Config{Models: models, Scaling: scaling})
//
// Kubernetes' API server checks the permission of a client by its RBAC rules, and forwards the request with a client
// certificate (its front proxy's) and the name of the client in the header X-Remote-User. [Secure] restricts a port to
// this certificate. So the indexer needs no access to the API server, and no account of Kubernetes.
//
// A metric has a value for each model, with the label "model": the name of the model, with an underscore for every
// character that a label must not have. The selector of a request chooses the models. An autoscaler adds up the values
// of all chosen models.
//
// A value is of the whole fleet. If a node does not answer, the request fails, and the autoscaler keeps the number of
// replicas.
//
// The types have the fields and the order of k8s.io/metrics and k8s.io/apimachinery. testdata has their encoding.
package externalmetrics
