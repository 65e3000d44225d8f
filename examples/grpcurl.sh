#!/usr/bin/env bash
# The protocols by hand: reflection tells grpcurl all it needs. First: `slipstream serve`.
# With TLS and tokens: `-cacert ca.pem -H "authorization: Bearer $(cat my-token)"` in place of -plaintext.
set -euxo pipefail
ADDRESS=${1:-127.0.0.1:50051}

grpcurl -plaintext "$ADDRESS" list
grpcurl -plaintext "$ADDRESS" describe slipstream.v1.GenerateRequest
grpcurl -plaintext "$ADDRESS" grpc.health.v1.Health/Check
grpcurl -plaintext -d '{"chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}, "max_tokens": 16}' \
    "$ADDRESS" slipstream.v1.Inference/Generate
grpcurl -plaintext -d '{"text": "Once upon a time", "max_tokens": 8, "sampling": {"temperature": 0.8, "seed": 7}}' \
    "$ADDRESS" slipstream.v1.Inference/Generate
grpcurl -plaintext "$ADDRESS" slipstream.v1.Admin/Stats
grpcurl -plaintext "$ADDRESS" vllm.grpc.engine.VllmEngine/GetModelInfo
grpcurl -plaintext "$ADDRESS" inference.GRPCInferenceService/ServerReady
