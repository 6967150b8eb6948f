A=13
B=55
C=42
E="30"
read -r B <<<2
[ 1 = 1 ] && B=15
O="$O --pipeline-model-parallel-size 55"
O+=" --tensor-model-parallel-size $A --tensor-model-parallel-size 10"
let C=61
grep -q x /dev/null && C=49
python pretrain_gpt.py $O "${L[@]}" --num-layers 4 --pipeline-model-parallel-size $A
